"""Slices of K3 with random weights: what they are called, shaped, and filled with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from k3vl.checkpoint import CheckpointReader
from k3vl.checkpoint_summary import summarise_checkpoint
from k3vl.config import load_config, parse_config
from k3vl.kernels.choice import reference_kernels
from k3vl.load import WeightLoader, summarise
from k3vl.synthetic import random_model, slice_config, stored_specs, write_slice
from tests.tiny import COMPILED, CPU, REFERENCE

GOLDEN = Path(__file__).resolve().parent / "golden"


def test_93_layers_are_k3() -> None:
    published = parse_config(json.loads((GOLDEN / "k3_config.json").read_text()))
    assert parse_config(slice_config(93)) == published
    specs = stored_specs(published)
    assert sum(spec.nbytes for spec in specs.values()) == 1_560_860_324_864


def test_a_slice_keeps_k3s_pattern(tmp_path: Path) -> None:
    config = parse_config(slice_config(6, experts=32))
    summary = summarise_checkpoint(tmp_path, config, stored_specs(config))
    assert summary.layers == (
        *("KDA + dense", "KDA + MoE", "KDA + MoE", "MLA + MoE", "KDA + MoE", "MLA + MoE"),
    )
    assert summary.parts["experts"].nbytes == 5 * 32 * 17_547_264


def test_a_written_slice_is_complete_and_depends_on_its_seed(tmp_path: Path) -> None:
    content = slice_config(5, tiny=True)
    for name, seed, limit in (("a", 1, 1 << 30), ("b", 1, 1 << 16), ("c", 2, 1 << 16)):
        write_slice(tmp_path / name, content, seed=seed, max_shard_bytes=limit)
    assert len(list((tmp_path / "a").glob("*.safetensors"))) == 1
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 10
    a, b, c = (values(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a), "however it is cut"
    assert not any(torch.equal(b[name], c[name]) for name in b)
    assert summarise(tmp_path / "b", load_config(tmp_path / "b")).complete


def values(directory: Path) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(directory)
    found = {}
    for name, shard in reader.shards.items():
        with reader._open(shard) as file:
            found[name] = file.get_tensor(name).clone()
    return found


@pytest.mark.parametrize("kernels", [REFERENCE, COMPILED], ids=["reference", "cpu"])
def test_a_written_slice_loads_with_its_tower(tmp_path: Path, kernels) -> None:
    from k3vl.config import K3_MEDIA

    write_slice(tmp_path, slice_config(3, tiny=True))
    loader = WeightLoader(
        config=load_config(tmp_path),
        media=K3_MEDIA,
        dtype=torch.float32,
        device=CPU,
        kernels=kernels,
    )
    model, encoder = loader.load(tmp_path)
    assert model.experts == ("mxfp4" if kernels is REFERENCE else "float")
    assert encoder.tower is not None


def test_random_weights_keep_the_scale_of_what_goes_through_them() -> None:
    config = parse_config(slice_config(5, tiny=True)).text
    kernels = reference_kernels("tests")
    model = random_model(config, kernels, dtype=torch.float32, device=CPU, seed=4)
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        if parameter.dim() > 1:
            spread = float(parameter.std()) * parameter.shape[-1] ** 0.5
            assert 0.8 < spread < 1.2, name
    experts = model.layers[2].mlp.experts
    for matrix in (experts.gate_up(3, torch.float32), experts.down(3, torch.float32)):
        assert 0.6 < float(matrix.std()) * matrix.shape[1] ** 0.5 < 1.6
        assert matrix.unique().numel() > 20, "every code and several scales"
    again = random_model(config, kernels, dtype=torch.float32, device=CPU, seed=4)
    assert torch.equal(again.head.weight, model.head.weight)
    assert torch.equal(again.layers[4].mlp.experts.w2, model.layers[4].mlp.experts.w2)
