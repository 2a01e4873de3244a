import json

import pytest

from k3vl.demo.atlas import CELL, HELD, TRAIN, is_held, load_atlas
from k3vl.errors import ConfigError


def test_styles_share_no_sprite_and_cover_all(atlas):
    found = [i for style in atlas.styles for ids in atlas.by_name(style).values() for i in ids]
    assert sorted(found) == list(range(len(atlas.sprites)))


def test_held_rule_is_the_published_one():
    # MD5("1F004/noto") ends in ...; the rule must never drift, or evaluation would leak.
    held = [c for c in range(2000) if is_held(f"{c:04X}", "noto")]
    assert 100 < len(held) < 220
    assert is_held("1F004", "fluent-3d") == is_held("1F004", "fluent-hc")


def test_held_cells_never_occur_in_training(atlas):
    training = {i for ids in atlas.by_name(TRAIN).values() for i in ids}
    assert not training & atlas.held
    assert {i for ids in atlas.by_name(HELD).values() for i in ids} == atlas.held


def test_pixels_are_the_pictures(atlas):
    pixels = atlas.pixels()
    assert pixels.shape == (len(atlas.sprites), CELL, CELL, 4)
    assert (pixels[7] == atlas.picture(7)).all()


def test_missing_list_is_a_config_error(tmp_path):
    (tmp_path / "concepts.json").write_text(json.dumps([]))
    with pytest.raises(ConfigError, match="not an atlas folder"):
        load_atlas(tmp_path)


def test_unknown_style_is_a_config_error(atlas):
    with pytest.raises(ConfigError, match="emojione"):
        atlas.by_name("emojione")
