"""The MoE layer on a GPU never waits for it, at any number of tokens and in either form."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from k3vl.config import parse_config
from k3vl.lm.moe import LatentMoE
from k3vl.synthetic import slice_config
from tests.device_only import META, device_only

pytest.importorskip("triton")

from k3vl.kernels.choice import triton_kernels
from k3vl.kernels.moe import gpu, joined
from k3vl.kernels.moe.few import SHAPES
from k3vl.kernels.moe.gpu import FEW_PAIRS, SORTED_TOKENS, moe_experts_mxfp4_gpu
from k3vl.kernels.moe.mxfp4 import Mxfp4Experts
from k3vl.kernels.moe.plan import FINE_WIDTHS, WIDTHS
from k3vl.kernels.situ import SituGLU

K3 = parse_config(slice_config(4)).text


@pytest.mark.parametrize("form", ["float", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 32, 8192])
def test_the_layer_keeps_the_device_fed(tokens: int, form: str) -> None:
    """K3's own dimensions; what a layer of them would take is never allocated."""
    activation = SituGLU(beta=4.0, linear_beta=25.0)
    layer = LatentMoE(
        K3, activation, triton_kernels("tests"), form=form, dtype=torch.bfloat16, device=META
    ).requires_grad_(False)
    x = torch.empty(tokens, K3.hidden_size, dtype=torch.bfloat16, device=META)
    with torch.inference_mode(), device_only() as launches:
        out = layer(x)
    assert out.shape == x.shape
    assert out.dtype == torch.bfloat16
    kernels = Counter(launch.kernel for launch in launches)
    few = tokens * K3.num_experts_per_token <= FEW_PAIRS
    joined = form == "mxfp4" and tokens > 32  # one product a step for many tokens, in fine tiles
    product = "joined" if joined else "mxfp4" if form == "mxfp4" else "dense"
    # no expert has more pairs than there are tokens
    widths = {1: 1, 32: 2, 8192: len(FINE_WIDTHS if joined else WIDTHS)}[tokens]
    planned = {"plan_kernel": 1} if few else {"tiles_kernel": 1} if joined else {}
    route = "route_sorted_kernel" if tokens <= SORTED_TOKENS else "route_kernel"
    assert kernels == {
        **planned,
        f"gate_up_{product}_kernel": widths,
        f"down_{product}_kernel": widths,
        "combine_kernel": 1,  # sum and norm in one
        route: 1,
        # A token's projections: both in front, gates and ups as one, and each of the two behind.
        **({"row_linear_kernel": 4} if tokens == 1 else {"glu_kernel": 1}),
    }


def test_a_step_without_tokens_launches_nothing_over_experts() -> None:
    stored = Mxfp4Experts.empty(4, 64, 32, META)
    x, weights = torch.empty(0, 64, device=META), torch.empty(0, 2, device=META)
    chosen = torch.empty(0, 2, dtype=torch.int64, device=META)
    with device_only() as launches:
        activation = SituGLU(beta=4.0, linear_beta=25.0)
        assert moe_experts_mxfp4_gpu(x, weights, chosen, stored, activation).shape == (0, 64)
    assert launches == []


@pytest.mark.parametrize("tokens", [2, 128])
def test_launches_for_few_tokens(tokens: int) -> None:
    """128 tokens may share an expert, which then has wider tiles."""
    stored = Mxfp4Experts.empty(896, 3584, 3072, META)
    x = torch.empty(tokens, 3584, dtype=torch.bfloat16, device=META)
    weights = torch.empty(tokens, 16, device=META)
    chosen = torch.empty(tokens, 16, dtype=torch.int64, device=META)
    activation = SituGLU(beta=4.0, linear_beta=25.0)
    with device_only() as launches:
        moe_experts_mxfp4_gpu(x, weights, chosen, stored, activation, few=SHAPES)
    wide = 3 if tokens == 128 else 0
    assert Counter(launch.kernel for launch in launches) == Counter(
        {
            "plan_kernel": 1,
            "gate_up_few_kernel": 1,
            "gate_up_mxfp4_kernel": wide,
            "down_few_kernel": 1,
            "down_mxfp4_kernel": wide,
            "combine_kernel": 1,
        }
    )


def test_a_token_alone_needs_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "hopper_runs", lambda _: True)
    stored = Mxfp4Experts.empty(896, 3584, 3072, META)
    x = torch.empty(1, 3584, dtype=torch.bfloat16, device=META)
    weights = torch.empty(1, 16, device=META)
    chosen = torch.empty(1, 16, dtype=torch.int64, device=META)
    with device_only() as launches:
        moe_experts_mxfp4_gpu(x, weights, chosen, stored, SituGLU(beta=4.0, linear_beta=25.0))
    names = [launch.kernel for launch in launches]
    assert names == ["gate_up_alone_kernel", "down_alone_kernel", "norm_sum_kernel"]


@pytest.mark.parametrize(
    ("tokens", "taken"), [(1, "alone"), (2, "few"), (128, "few"), (279, "few"), (280, "joined")]
)
def test_which_products_are_taken(tokens: int, taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Gluon runs, few tokens of bfloat16 have products of their own."""
    monkeypatch.setattr(gpu, "hopper_runs", lambda _: True)
    assert products_of(tokens, torch.bfloat16) == taken


def test_products_for_few_tokens_are_not_taken_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert products_of(8, torch.bfloat16) == "mxfp4"
    monkeypatch.setattr(gpu, "hopper_runs", lambda _: True)
    assert products_of(8, torch.float32) == "mxfp4"
    assert products_of(8, torch.bfloat16, latent=3584 - 128) == "mxfp4", "an odd number of steps"


def products_of(tokens: int, dtype: torch.dtype, latent: int = 3584) -> str:
    stored = Mxfp4Experts.empty(896, latent, 3072, META)
    x = torch.empty(tokens, latent, dtype=dtype, device=META)
    weights = torch.empty(tokens, 16, device=META)
    chosen = torch.empty(tokens, 16, dtype=torch.int64, device=META)
    with device_only() as launches:
        moe_experts_mxfp4_gpu(x, weights, chosen, stored, SituGLU(beta=4.0, linear_beta=25.0))
    names = [launch.kernel for launch in launches if launch.kernel.startswith("gate_up_")]
    return names[0].removeprefix("gate_up_").removesuffix("_kernel")


@pytest.mark.parametrize("width", FINE_WIDTHS)
@pytest.mark.parametrize("stages", [2, 3, 6, 9])
def test_blocks_fit_in_shared_memory(width: int, stages: int) -> None:
    """Whatever is asked for; the shapes that are taken fit as they are."""
    for rows, warps in ((64, 4), (64, 8), (128, 4), (128, 8)):
        shape = joined.Joined(rows=rows, warps=warps, stages=stages)
        cut, given = joined.block_of(shape, width)
        taken = cut, given["num_warps"], given["num_stages"], width
        assert joined.shared_bytes(*taken) <= joined.SHARED
        assert given["num_stages"] > 1
    taken = joined.SHAPES[width]
    assert joined.block_of(taken, width)[1]["num_stages"] == taken.stages


def test_shared_memory_is_what_the_compiler_takes() -> None:
    """For compute capability 9.0: rows, warps, stages, width; ``compile_check.py`` has all."""
    assert joined.shared_bytes(128, 8, 3, 160) == 141_312
    assert joined.shared_bytes(64, 4, 3, 16) == 21_504
