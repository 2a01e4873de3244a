"""Names of the vision part: the table, the placements, a real checkpoint."""

from pathlib import Path

import pytest
import torch

from k3vl.checkpoint import CheckpointReader
from k3vl.checkpoint_writer import save_checkpoint
from k3vl.config import K3_MEDIA, load_config
from k3vl.errors import WeightError
from k3vl.vision.weights import VISION_PREFIXES, expected_tensors, load_vision, placements
from tests.vision.tiny_vision import TINY, pixels, tiny_models

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "sglang_tiny"


def test_placements_are_the_table():
    places = placements(*tiny_models())
    table = expected_tensors(TINY)
    assert {n: tuple(p.target.shape) for n, p in places.items()} == {
        n: spec.shape for n, spec in table.items()
    }
    assert all(name.startswith(VISION_PREFIXES) for name in table)


def test_every_parameter_is_placed_once():
    tower, projector = tiny_models()
    placed = {place.target.data_ptr() for place in placements(tower, projector).values()}
    parameters = [*tower.parameters(), *projector.parameters()]
    assert placed == {parameter.data_ptr() for parameter in parameters}
    assert len(placed) == len(expected_tensors(TINY))


def test_loads_its_part_of_a_whole_checkpoint():
    config = load_config(GOLDEN)
    reader = CheckpointReader(GOLDEN)
    tower, projector = load_vision(reader, config.vision, K3_MEDIA, dtype=torch.float32)
    features = projector(tower(pixels((1, 4, 6)), [(1, 4, 6)]))
    assert features.shape == (6, config.text.hidden_size)
    assert features.isfinite().all()
    assert not any(p.requires_grad for p in [*tower.parameters(), *projector.parameters()])


def test_a_saved_model_comes_back_the_same(tmp_path):
    tower, projector = tiny_models()
    stored = {n: p.target for n, p in placements(tower, projector).items()}
    save_checkpoint(tmp_path, stored, json_files={})
    again = load_vision(CheckpointReader(tmp_path), TINY, K3_MEDIA, dtype=torch.float32)
    patches = pixels((2, 2, 4))
    expected = projector(tower(patches, [(2, 2, 4)]))
    assert torch.equal(again[1](again[0](patches, [(2, 2, 4)])), expected)


def test_a_bias_or_a_missing_block_is_an_error(tmp_path):
    stored = {n: p.target for n, p in placements(*tiny_models()).items()}
    stored["vision_tower.patch_embed.proj.bias"] = torch.zeros(24)
    del stored["vision_tower.encoder.blocks.1.wo.weight"]
    save_checkpoint(tmp_path, stored, json_files={})
    with pytest.raises(WeightError) as caught:
        load_vision(CheckpointReader(tmp_path), TINY, K3_MEDIA, dtype=torch.float32)
    assert "blocks.1.wo.weight) missing" in str(caught.value)
    assert "patch_embed.proj.bias) left over" in str(caught.value)
