"""What ranks hold of a model, and that their sums are the whole model's results."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from k3vl.checkpoint import CheckpointReader
from k3vl.checkpoint_writer import write_checkpoint
from k3vl.config import DEMO_CHECKPOINT, load_config, parse_config
from k3vl.errors import ConfigError, WeightError
from k3vl.kernels.choice import reference_kernels, triton_kernels
from k3vl.lm.batch import Row
from k3vl.lm.ranks import Cut, Ranks, axis_of, part_of, split_kernels
from k3vl.lm.table import expected_tensors
from k3vl.lm.weights import PREFIX, load_model, stored_tensors
from k3vl.synthetic import random_model, slice_config
from tests.tiny import CPU, KIMI_LINEAR, TINY, Runner, tokens

if TYPE_CHECKING:
    from pathlib import Path

    from k3vl.config import TextConfig
    from k3vl.kernels.choice import Kernels
    from k3vl.lm.model import K3Model

PACKED = reference_kernels("tests")
FLOAT = replace(PACKED, latent_moe_mxfp4=None)
EVEN = replace(TINY, num_attention_heads=4, vocab_size=96, moe_intermediate_size=64)
FOUR = replace(EVEN, linear_attn_config=replace(EVEN.linear_attn_config, num_heads=4))
WIDE = replace(FOUR, routed_expert_hidden_size=32, moe_intermediate_size=128)
TILED = replace(WIDE, routed_expert_hidden_size=128, moe_intermediate_size=256)
FAMILY = replace(KIMI_LINEAR, num_attention_heads=4, vocab_size=96)
MODELS = [
    pytest.param(FOUR, FLOAT, id="K3"),
    pytest.param(WIDE, PACKED, id="K3, packed"),
    pytest.param(TILED, PACKED, id="K3, packed in tiles"),
    pytest.param(FAMILY, FLOAT, id="Kimi-Linear"),
]


class Together(Ranks):
    """Ranks that are threads of one process."""

    def __init__(self, rank: int, size: int, meet: threading.Barrier, held: list) -> None:
        super().__init__(rank, size)
        self.meet, self.held = meet, held

    def shown(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.held[self.rank] = x.clone()
        self.meet.wait(60)
        all_ = list(self.held)
        self.meet.wait(60)
        return all_

    def add(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(sum(self.shown(x)))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.shown(x), -1)


def model_of(config: TextConfig, kernels: Kernels, ranks: Ranks | None = None) -> K3Model:
    kernels = kernels if ranks is None else split_kernels(kernels, ranks)
    return random_model(config, kernels, dtype=torch.float32, device=CPU, ranks=ranks)


def logits_of(model: K3Model) -> torch.Tensor:
    """Of a prompt, and of two tokens behind it."""
    with torch.inference_mode():
        runner, ids = Runner(model), tokens(22, vocab=90)
        rows = [
            Row(token_ids=ids[begin:end], context_len=begin, slot=0, pages=[0, 1])
            for begin, end in ((0, 20), (20, 21), (21, 22))
        ]
        return torch.cat([runner.run([row], all_logits=True) for row in rows])


@pytest.mark.parametrize(("config", "kernels"), MODELS)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_give_the_whole_models_logits(
    config: TextConfig, kernels: Kernels, size: int
) -> None:
    if config is FAMILY and size == 4:
        config = replace(config, linear_attn_config=replace(config.linear_attn_config, num_heads=4))
    meet, held = threading.Barrier(size), [None] * size
    ranks = [Together(rank, size, meet, held) for rank in range(size)]
    models = [model_of(config, kernels, each) for each in ranks]
    with ThreadPoolExecutor(size) as threads:
        got = list(threads.map(logits_of, models))
    want = logits_of(model_of(config, kernels))
    assert all(torch.equal(each, got[0]) for each in got), "the same bits, so the same tokens"
    assert got[0].shape == want.shape == (22, config.vocab_size)
    assert float((got[0] - want).norm() / want.norm()) < 1e-5


@pytest.mark.parametrize(("config", "kernels"), MODELS)
def test_a_rank_loads_its_share_of_every_tensor(
    config: TextConfig, kernels: Kernels, tmp_path: Path
) -> None:
    """And the checkpoint's names are divided as the model's parameters are."""
    whole = model_of(config, kernels)
    specs = expected_tensors(config, quantized_experts=whole.experts == "mxfp4")
    stored = {
        name: tensor.to(specs[name].dtype).contiguous()
        for name, tensor in stored_tensors(whole).items()
    }
    write_checkpoint(tmp_path, specs, stored.__getitem__, json_files={})
    reader, kind = CheckpointReader(tmp_path), {"dtype": torch.float32, "device": CPU}
    again = load_model(reader, config, kernels, **kind).state_dict()
    for ranks in (Ranks(0, 2), Ranks(1, 2)):
        part = load_model(reader, config, split_kernels(kernels, ranks), **kind, ranks=ranks)
        assert part.experts == whole.experts
        for name, tensor in part.state_dict().items():
            cut = Cut.of(ranks, part, name)
            assert list(again[name].shape) == cut.whole_shape(tensor.shape)
            assert torch.equal(cut.share(again[name]), tensor), name


def test_codes_of_the_demo_model_are_decoded_share_by_share() -> None:
    """Groups of its 8 bits are as wide as some rows; columns are taken of what is decoded."""
    config, reader = load_config(DEMO_CHECKPOINT).text, CheckpointReader(DEMO_CHECKPOINT)
    kind = {"dtype": torch.float32, "device": CPU}
    whole = load_model(reader, config, FLOAT, **kind).state_dict()
    ranks = Ranks(1, 2)
    part = load_model(reader, config, split_kernels(FLOAT, ranks), **kind, ranks=ranks)
    for name, tensor in part.state_dict().items():
        assert torch.equal(Cut.of(ranks, part, name).share(whole[name]), tensor), name
    sizes = [sum(t.numel() for t in m.values()) for m in (whole, part.state_dict())]
    assert sizes[1] < 0.65 * sizes[0]


def test_a_share_of_a_wrong_tensor_is_refused_by_its_whole_shape(tmp_path: Path) -> None:
    specs = expected_tensors(FOUR, quantized_experts=False)
    name = f"{PREFIX}model.layers.0.self_attn.o_proj.weight"
    specs[name] = replace(specs[name], shape=(32, 30))
    write_checkpoint(
        tmp_path,
        specs,
        lambda name: torch.zeros(specs[name].shape, dtype=specs[name].dtype),
        json_files={},
    )
    ranks = Ranks(0, 2)
    kernels = split_kernels(FLOAT, ranks)
    with pytest.raises(WeightError, match=r"o_proj.weight is \[32, 30\], .* needs \[32, 32\]"):
        load_model(
            CheckpointReader(tmp_path), FOUR, kernels, dtype=torch.float32, device=CPU, ranks=ranks
        )


def test_a_part_of_k3_has_half_of_the_heads_and_widths() -> None:
    config = parse_config(slice_config(3)).text
    half = part_of(config, 2, "mxfp4")
    assert (half.num_attention_heads, half.linear_attn_config.num_heads) == (48, 48)
    assert (half.moe_intermediate_size, half.shared_intermediate_size) == (1536, 3072)
    assert half.intermediate_size == config.intermediate_size // 2
    assert (half.hidden_size, half.expert_hidden_size) == (7168, 3584)
    assert (half.num_experts, half.vocab_size) == (config.num_experts, config.vocab_size)
    assert part_of(config, 8, "mxfp4").moe_intermediate_size == 384
    assert part_of(config, 1) == config


@pytest.mark.parametrize(
    ("change", "size", "message"),
    [
        ({"num_attention_heads": 3}, 2, "2 ranks: num_attention_heads is 3, which they do not"),
        ({}, 3, "3 ranks: num_attention_heads is 4"),
        ({"intermediate_size": 49}, 2, "intermediate_size is 49"),
        ({"vocab_size": 97}, 2, "vocab_size is 97"),
        ({"moe_intermediate_size": 96}, 2, "moe_intermediate_size is 96, .* groups of 32"),
    ],
)
def test_what_ranks_cannot_divide_is_said(change: dict, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        part_of(replace(WIDE, **change), size, "mxfp4")
    if "groups" in message:
        part_of(replace(WIDE, **change), size, "float")


def test_names_that_end_alike_are_not_divided() -> None:
    assert axis_of("model.layers.1.block_sparse_moe.shared_experts.down_proj.weight") == 1
    assert axis_of("model.layers.1.block_sparse_moe.routed_expert_down_proj.weight") is None
    assert axis_of("model.layers.1.self_attn.f_a_proj.weight") is None
    assert axis_of("model.layers.1.self_attn.A_log") == 0


def test_all_that_is_large_is_divided() -> None:
    """Of K3's layers ranks share all but routers, latent and low-rank projections."""
    config = parse_config(slice_config(5)).text
    left = sum(
        math.prod(spec.shape)
        for name, spec in expected_tensors(config, quantized_experts=False).items()
        if ".layers." in name and axis_of(name) is None
    )
    layers = sum(
        math.prod(spec.shape)
        for name, spec in expected_tensors(config, quantized_experts=False).items()
        if ".layers." in name
    )
    assert left / layers < 0.003


def test_kernels_of_a_gpu_stay_what_they_are() -> None:
    pytest.importorskip("triton")
    kernels = triton_kernels("tests")
    split = split_kernels(kernels, Ranks(0, 2))
    assert (split.name, split.recordable, split.linear) == ("triton", True, kernels.linear)
