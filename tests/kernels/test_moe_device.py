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
from k3vl.kernels.moe.gpu import FEW_PAIRS, SORTED_TOKENS
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
    packed = "mxfp4" if tokens <= 32 else "joined"  # one product a step for many tokens
    product = packed if form == "mxfp4" else "dense"
    widths = {1: 1, 32: 2, 8192: 5}[tokens]  # no expert has more pairs than there are tokens
    assert kernels == {
        "route_sorted_kernel" if tokens <= SORTED_TOKENS else "route_kernel": 1,
        **({"plan_kernel": 1} if few else {}),
        f"gate_up_{product}_kernel": widths,
        f"down_{product}_kernel": widths,
        "combine_kernel": 1,  # sum and norm in one
        # A token's projections: both in front, gates and ups with their activation, down, up.
        **({"row_linear_kernel": 4} if tokens == 1 else {"glu_kernel": 1}),
    }


def test_a_step_without_tokens_launches_nothing_over_experts() -> None:
    from k3vl.kernels.moe.gpu import moe_experts_mxfp4_gpu
    from k3vl.kernels.moe.mxfp4 import Mxfp4Experts

    stored = Mxfp4Experts.empty(4, 64, 32, META)
    x, weights = torch.empty(0, 64, device=META), torch.empty(0, 2, device=META)
    chosen = torch.empty(0, 2, dtype=torch.int64, device=META)
    with device_only() as launches:
        activation = SituGLU(beta=4.0, linear_beta=25.0)
        assert moe_experts_mxfp4_gpu(x, weights, chosen, stored, activation).shape == (0, 64)
    assert launches == []


@pytest.mark.parametrize("tokens", [1, 8, 128])
def test_launches_for_few_tokens(tokens: int) -> None:
    """A token alone needs no plan; 128 may share an expert, which then has wider tiles."""
    from k3vl.kernels.moe.few import FewShapes
    from k3vl.kernels.moe.gpu import moe_experts_mxfp4_gpu
    from k3vl.kernels.moe.mxfp4 import Mxfp4Experts

    stored = Mxfp4Experts.empty(896, 3584, 3072, META)
    x = torch.empty(tokens, 3584, dtype=torch.bfloat16, device=META)
    weights = torch.empty(tokens, 16, device=META)
    chosen = torch.empty(tokens, 16, dtype=torch.int64, device=META)
    activation = SituGLU(beta=4.0, linear_beta=25.0)
    with device_only() as launches:
        moe_experts_mxfp4_gpu(x, weights, chosen, stored, activation, few=FewShapes())
    wide = 3 if tokens == 128 else 0
    assert Counter(launch.kernel for launch in launches) == Counter(
        {
            "plan_kernel": int(tokens > 1),
            "gate_up_few_kernel": 1,
            "gate_up_mxfp4_kernel": wide,
            "down_few_kernel": 1,
            "down_mxfp4_kernel": wide,
            "combine_kernel": 1,
        }
    )
