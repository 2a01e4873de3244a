import json
import shutil

import numpy as np
import torch
from PIL import Image, ImageDraw

from k3vl.demo.atlas import CELL, INK_SUFFIX, MORE, TRAIN, is_one_colour, load_atlas
from k3vl.demo.icons import fit, icons_of, on_paper, svg
from k3vl.demo.scene import KEEPS_COLOUR, KEEPS_SHAPE, VARIANTS, SceneMaker, SceneOptions
from k3vl.demo.variants import HIDDEN_SHARE, SpriteBank, pack_sprites, redraw


def _sprites(count=4):
    plain = torch.zeros(count, 4, CELL, CELL)
    plain[:, 0, 20:70, 30:60] = 0.8
    plain[:, 2, 30:50, 35:50] = 0.6
    plain[:, 3, 20:70, 30:60] = 1
    return plain


def test_the_first_drawing_is_plain_and_renewing_changes_the_others(atlas):
    bank = SpriteBank(atlas, "cpu", torch.Generator().manual_seed(1))
    drawn = bank.packed.view(-1, VARIANTS, CELL * CELL)
    before = drawn.clone()
    assert len(drawn) == len(atlas.sprites) + 12
    raw = torch.from_numpy(atlas.pixels()[:5]).permute(0, 3, 1, 2).float() / 255
    raw[:, :3] *= raw[:, 3:]
    assert (drawn[:5, 0] == pack_sprites(raw)).all()
    bank.renew()
    assert (drawn[:, 0] == before[:, 0]).all()
    assert (drawn[:5, 1:] != before[:5, 1:]).any(2).float().mean() > 0.5


def test_redrawings_keep_what_they_promise():
    source = torch.Generator().manual_seed(0)
    plain = _sprites(16)
    shaped = redraw(plain, source, shape_only=True, recolour=False)
    red, _, _, alpha = shaped.unbind(1)
    assert (red[alpha > 0.9] > 0.5).float().mean() > 0.9, "no ink inside"
    coloured = redraw(plain, source, shape_only=False, recolour=True)
    for drawn in (shaped, coloured):
        assert drawn.min() > -1e-4
        assert (drawn[:, :3] <= drawn[:, 3:] + 1e-3).all(), "colour is premultiplied"
        assert (drawn[:, 3] > 0.5).flatten(1).sum(1).min() > 400, "nothing is lost"


def test_some_redrawings_lose_a_part():
    plain = torch.zeros(400, 4, CELL, CELL)
    plain[:, 1, 8:88, 8:88] = plain[:, 3, 8:88, 8:88] = 1
    drawn = redraw(plain, torch.Generator().manual_seed(3), shape_only=True, recolour=False)
    inner = drawn[:, 3, 28:68, 28:68]  # behind no warped edge
    cut = (inner < 0.1).flatten(1).float().mean(1)
    share = (cut > 0.02).float().mean()
    assert HIDDEN_SHARE / 4 < share < HIDDEN_SHARE, share
    assert cut.max() < 0.95
    assert len(set(cut.tolist())) > 20, "each is cut elsewhere"


def test_fixed_colours_are_never_redrawn_in_others(atlas):
    maker = SceneMaker(atlas, 1, noise=True)
    seen = set()
    for _ in range(300):
        for item in maker.scene(SceneOptions(shapes=False)).items:
            seen.add(item.variant)
            if atlas.sprites[item.sprite].drawing_set == "fluent-hc":
                assert item.variant <= KEEPS_SHAPE
            elif item.name == "green apple":
                assert item.variant <= KEEPS_COLOUR
    assert max(seen) == VARIANTS - 1
    assert 0 in seen


def test_further_drawings_are_for_training_only(atlas_folder, tmp_path):
    folder = tmp_path / "atlas"
    shutil.copytree(atlas_folder, folder)
    rows = json.loads((folder / "train.json").read_text())
    own = [row | {"set": f"ph{INK_SUFFIX}"} for row in rows[:3]]
    (folder / "more-icons.json").write_text(json.dumps(own))
    atlas = load_atlas(folder)
    assert atlas.styles == load_atlas(atlas_folder).styles
    assert atlas.held == load_atlas(atlas_folder).held
    assert len(atlas.by_name(MORE)) > 0
    assert all(is_one_colour(atlas.sprites[i].drawing_set) for i in atlas.by_name(MORE)[0])
    assert not set(atlas.by_name(MORE)[0]) & set(atlas.by_name(TRAIN)[0])

    def styles(noise):
        maker = SceneMaker(atlas, 1, noise=noise)
        items = [i for _ in range(200) for i in maker.scene(SceneOptions(shapes=False)).items]
        return {atlas.sprites[item.sprite].style for item in items}

    assert styles(noise=True) == {TRAIN, MORE}
    assert styles(noise=False) == {TRAIN}


def test_icons_are_found_by_name_in_line_and_filled():
    table = {"icons": {"cat": {}, "cat-fill": {}, "cat-bold": {}, "womans-hat-outline": {}}}
    assert icons_of(table, "cat") == ["cat", "cat-fill"]
    assert icons_of(table, "woman\u2019s hat") == ["womans-hat-outline"]
    assert icons_of(table, "dog") == []


def test_aliases_are_drawn_as_their_parents():
    table = {
        "icons": {"cat": {"body": '<path fill="currentColor"/>'}},
        "aliases": {"kitty": {"parent": "cat"}},
        "height": 24,
    }
    assert 'viewBox="0 0 16 24"' in svg(table, "kitty")
    assert "currentColor" not in svg(table, "kitty")


def test_paper_fills_what_ink_encloses():
    ring = Image.new("L", (200, 100))
    ImageDraw.Draw(ring).ellipse((60, 10, 140, 90), outline=255, width=8)
    ink = fit(ring)
    assert np.asarray(ink)[CELL // 2, CELL // 2] == 0
    paper = np.asarray(on_paper(ink))
    assert paper[CELL // 2, CELL // 2].tolist() == [255, 255, 255, 255]
    assert paper[0, 0, 3] == 0
    stroke = Image.new("L", (200, 100))
    ImageDraw.Draw(stroke).line((0, 0, 199, 99), fill=255, width=8)
    assert on_paper(fit(stroke)) is None
    assert fit(Image.new("L", (9, 9))) is None
