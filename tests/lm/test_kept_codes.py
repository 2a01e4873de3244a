"""Weights that stay in the 8 bits that a checkpoint stores them in."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from k3vl.checkpoint import CheckpointReader
from k3vl.checkpoint_writer import save_checkpoint
from k3vl.errors import WeightError
from k3vl.kernels.int8 import quantize_int8
from k3vl.kernels.weight import Rows
from k3vl.lm.batch import Row
from k3vl.lm.weights import load_model, stored_tensors
from tests.tiny import COMPILED, CPU, KIMI_LINEAR, REFERENCE, TINY, Runner, tiny_model, tokens

if TYPE_CHECKING:
    from pathlib import Path

    from k3vl.config import TextConfig
    from k3vl.kernels.choice import Kernels
    from k3vl.lm.model import K3Model

DECODING = replace(COMPILED, latent_moe_coded=None)
PREFIX = "language_model."


def write(directory: Path, config: TextConfig) -> Path:
    """A tiny model with most matrices in 8 bits; groups of 16 where the columns allow it."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in stored_tensors(tiny_model(config)).items():
        matrix = name.endswith("proj.weight") or ".experts." in name or "lm_head" in name
        if not matrix or name.endswith(("b_proj.weight", "_res_proj.weight")):
            tensors[name] = tensor
            continue
        width = tensor.shape[1]
        codes, scale = quantize_int8(tensor, width if width % 16 else 16)
        tensors |= {name: codes, f"{name}_scale": scale}
    save_checkpoint(directory, tensors, json_files={})
    return directory


def load(directory: Path, config: TextConfig, kernels: Kernels) -> K3Model:
    reader = CheckpointReader(directory)
    return load_model(reader, config, kernels, dtype=torch.float32, device=CPU)


def logits(model: K3Model) -> torch.Tensor:
    """Of 21 tokens of a prompt, then of one more."""
    runner, ids = Runner(model), tokens(22)
    first = Row(token_ids=ids[:21], context_len=0, slot=0, pages=[0, 1])
    last = Row(token_ids=ids[21:], context_len=21, slot=0, pages=[0, 1])
    return torch.cat([runner.run([first], all_logits=True), runner.run([last])])


@pytest.mark.parametrize("config", [TINY, KIMI_LINEAR], ids=["k3", "kimi-linear"])
def test_the_bits_of_the_decoded_model(tmp_path: Path, config: TextConfig) -> None:
    directory = write(tmp_path / "model", config)
    kept, decoded = load(directory, config, COMPILED), load(directory, config, DECODING)
    assert isinstance(kept.weights.matrix, Rows)
    assert isinstance(decoded.weights.matrix, torch.Tensor)
    got = logits(kept)
    assert got.isfinite().all()
    assert torch.equal(got, logits(decoded))
    want = logits(load(directory, config, REFERENCE))
    assert (got - want).norm() / want.norm() < 1e-4  # what a tiny model makes of rounding


def test_what_is_kept_is_not_held_twice(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", TINY)
    kept, decoded = load(directory, TINY, COMPILED), load(directory, TINY, DECODING)
    floating = sum(parameter.numel() for parameter in kept.parameters())
    assert floating < 0.5 * sum(parameter.numel() for parameter in decoded.parameters())
    write_logits = kept.layers[0].attn.in_proj.weight  # b_proj alone is floating there
    assert torch.equal(write_logits, decoded.layers[0].attn.in_proj.weight[-len(write_logits) :])
    assert len(write_logits) == TINY.linear_attn_config.num_heads


def test_a_scale_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", TINY)
    reader = CheckpointReader(directory)
    name = f"{PREFIX}model.layers.0.self_attn.q_proj.weight_scale"
    assert name in reader.shards
    specs = {n: torch.empty(s.shape, dtype=s.dtype) for n, s in reader.specs().items()}
    broken = {n: t.zero_() if t.is_floating_point() else t for n, t in specs.items()}
    broken[name].fill_(float("inf"))
    save_checkpoint(tmp_path / "broken", broken, json_files={})
    with pytest.raises(WeightError, match="scales are not numbers"):
        load(tmp_path / "broken", TINY, COMPILED)
