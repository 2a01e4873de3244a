"""MLA, short convolution, attention residuals, norms, activations, experts: against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from k3vl.errors import ShapeError
from k3vl.kernels.attn_residual import attn_residual
from k3vl.kernels.gated_norm import gated_norm
from k3vl.kernels.mla import (
    mla_decode,
    mla_prefill,
    mla_prefill_latent,
    mla_store,
    mla_values,
)
from k3vl.kernels.moe import moe_experts, route
from k3vl.kernels.moe.experts import FloatExperts
from k3vl.kernels.rms_norm import rms_norm
from k3vl.kernels.short_conv import short_conv
from k3vl.kernels.situ import SiluGLU, SituGLU, glu

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.isfinite().all()
    return float((got.double() - want).norm() / want.norm())


# ------------------------------------------------------------------ norms and activations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_rms_norm(dtype: torch.dtype, eps: float) -> None:
    x, weight = (normal(3, 7) * 0.1).to(dtype), normal(7).to(dtype)
    want = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)
    got = rms_norm(x, weight, eps)
    assert got.dtype == dtype
    assert relative_error(got, want * weight.double()) < (1e-6 if dtype == torch.float32 else 4e-3)


def test_rms_norm_checks_the_width() -> None:
    with pytest.raises(ShapeError, match=r"x \(3, 7\) and weight \(6,\)"):
        rms_norm(normal(3, 7), normal(6), 1e-5)


def test_gate_follows_the_norm_and_is_not_normalised() -> None:
    x, gate, weight = normal(5, 3, 8), normal(5, 24) * 3, normal(8)
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5)
    want = (normed * weight.double()).flatten(1) * torch.sigmoid(gate.double())
    assert relative_error(gated_norm(x, gate, weight, 1e-5), want) < 1e-6


def test_situ_is_bounded_and_gates_with_the_uncapped_value() -> None:
    gate_up = normal(9, 14) * 5
    g, u = gate_up.double().chunk(2, -1)
    want = 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)
    assert relative_error(glu(gate_up, SituGLU(beta=4.0, linear_beta=25.0)), want) < 1e-6
    extreme = torch.tensor([[1e4, -1e4, 1e4, 1e4, 1e4, -1e4]])
    assert glu(extreme, SituGLU(beta=4.0, linear_beta=25.0)).tolist() == [[100.0, 0.0, -100.0]]


def test_silu_glu() -> None:
    gate_up = normal(4, 10)
    g, u = gate_up.double().chunk(2, -1)
    assert relative_error(glu(gate_up, SiluGLU()), F.silu(g) * u) < 1e-6
    with pytest.raises(ShapeError):
        glu(normal(4, 9), SiluGLU())


# ------------------------------------------------------------------ attention residuals


@pytest.mark.parametrize("count", [1, 2, 5])
def test_attention_residual_mixes_raw_rows_by_scores_of_normalised_ones(count: int) -> None:
    rows, query, weight = normal(count, 6, 16) * 3, normal(16), normal(16, seed=1)
    r = rows.double()
    scores = (r * query.double()).sum(-1) * torch.rsqrt(r.square().mean(-1) + 1e-5)
    mixed = (scores.softmax(0).unsqueeze(-1) * r).sum(0)
    want = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert relative_error(attn_residual(rows, query, weight, 1e-5), want) < 1e-5


def test_attention_residual_does_not_touch_its_rows() -> None:
    rows = normal(4, 3, 8)
    before = rows.clone()
    attn_residual(rows, normal(8), normal(8, seed=2), 1e-5)
    assert torch.equal(rows, before)


# ------------------------------------------------------------------ short convolution


@pytest.mark.parametrize("splits", [(9,), (1, 8), (1, 1, 1, 6), (2, 7), (3, 6), (4, 5), (1,) * 9])
def test_short_convolution_carries_its_window(splits: tuple[int, ...]) -> None:
    """Whatever the split, also into pieces shorter than the window, and beside another sequence."""
    channels, width = 5, 4
    x, weight = normal(9, channels), normal(channels, width)
    padded = F.pad(x.double().t().unsqueeze(0), (width - 1, 0))
    want = F.silu(F.conv1d(padded, weight.double().unsqueeze(1), groups=channels))[0].t()

    windows = torch.zeros(1, width - 1, channels)
    other = normal(2, channels, seed=5)
    outputs, done = [], 0
    for count in splits:
        padding = torch.full((2, channels), float("nan"))
        packed = torch.cat([other, x[done : done + count], padding])
        both = torch.cat([torch.zeros_like(windows), windows])
        cu_seqlens, ends = torch.tensor([0, 2, count + 4]), torch.tensor([2, count + 2])
        y, tails = short_conv(packed, weight, both, cu_seqlens, ends)
        outputs.append(y[2 : count + 2])
        windows = tails[1:]
        done += count
    assert relative_error(torch.cat(outputs), want) < 1e-6
    assert torch.equal(windows[0], x[-3:])


# ------------------------------------------------------------------ MLA


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (1, 7), (3, 7), (7, 8)])
def test_mla_prefill_is_causal_behind_a_prefix(queries: int, keys: int) -> None:
    heads, width, value, scale = 3, 6, 4, 0.4
    q, k, v = normal(queries, heads, width), normal(keys, heads, width), normal(keys, heads, value)
    scores = torch.einsum("thd,lhd->htl", q.double(), k.double()) * scale
    for t in range(queries):
        scores[:, t, keys - queries + t + 1 :] = float("-inf")
    want = torch.einsum("htl,lhv->thv", scores.softmax(-1), v.double())
    assert relative_error(mla_prefill(q, k, v, scale), want) < 1e-6
    shared = k[:, 0, 4:]
    k[..., 4:] = shared.unsqueeze(1)
    assert torch.equal(mla_prefill(q, k[..., :4], v, scale, shared), mla_prefill(q, k, v, scale))
    with pytest.raises(ShapeError, match=rf"shared \({keys}, 1\)"):
        mla_prefill(q, k[..., :4], v, scale, shared[:, :1])


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (1, 7), (3, 7), (7, 8)])
def test_mla_prefill_over_latents_is_prefill_with_one_shared_head(queries: int, keys: int) -> None:
    heads, latent, shared, scale = 3, 6, 2, 0.4
    q, context = normal(queries, heads, latent + shared), normal(keys, latent + shared, seed=1)
    repeated = context.unsqueeze(1).expand(-1, heads, -1)
    want = mla_prefill(q, repeated, repeated[..., :latent], scale)
    assert relative_error(mla_prefill_latent(q, context, latent, scale), want) < 1e-6
    with pytest.raises(ShapeError, match="mla_prefill_latent"):
        mla_prefill_latent(q, context[:, 1:], latent, scale)


def test_mla_decode_ignores_whatever_lies_past_the_end() -> None:
    heads, latent, shared, scale = 3, 6, 2, 0.3
    pool = normal(12, latent + shared)
    pool[[3, 9]] = float("nan")
    q = normal(2, heads, latent + shared)
    rows = torch.tensor([[4, 2, 7, 11, 0], [8, 1, 3, 9, 9]])
    lengths = torch.tensor([5, 2])
    got = mla_decode(q, pool, rows, lengths, latent, scale)
    for i, length in enumerate(lengths.tolist()):
        context = pool[rows[i, :length]].double()
        weights = (q[i].double() @ context.t() * scale).softmax(-1)
        assert relative_error(got[i], weights @ context[:, :latent]) < 1e-6


def test_mla_decode_reads_pages_and_gives_padding_zeros() -> None:
    pool, q = normal(12, 8), normal(3, 2, 8)
    lengths = torch.tensor([5, 0, 2])
    rows = torch.tensor([[9, 10, 11, 0, 1], [0, 0, 0, 0, 0], [4, 5, 4, 4, 4]])
    begins = torch.tensor([[9, 0], [0, 0], [4, 4]])
    got = mla_decode(q, pool, begins, lengths, 6, 0.3, 3)
    assert torch.equal(got, mla_decode(q, pool, rows, lengths, 6, 0.3))
    assert not got[1].any()


def test_mla_store_skips_padding() -> None:
    c, shared, weight = normal(3, 6), normal(3, 2), normal(6, seed=1)
    c[1] = float("nan")
    pool = torch.zeros(5, 8)
    mla_store(c, shared, weight, 1e-6, pool, torch.tensor([4, -1, 0]))
    assert torch.equal(pool[[4, 0], :6], rms_norm(c[[0, 2]], weight, 1e-6))
    assert torch.equal(pool[[4, 0], 6:], shared[[0, 2]])
    assert not pool[1:4].any()
    with pytest.raises(ShapeError, match=r"mla_store: c \(3, 6\), shared \(3, 1\)"):
        mla_store(c, shared[:, 1:], weight, 1e-6, pool, torch.tensor([4, -1, 0]))


def test_mla_values_expand_and_gate() -> None:
    mixed, values, gate = normal(4, 3, 6), normal(3, 5, 6), normal(4, 15)
    want = torch.einsum("bhr,hvr->bhv", mixed.double(), values.double()).flatten(1)
    assert relative_error(mla_values(mixed, values, None), want) < 1e-6
    gated = want * torch.sigmoid(gate.double())
    assert relative_error(mla_values(mixed, values, gate), gated) < 1e-6
    with pytest.raises(ShapeError, match=r"mla_values: mixed .*, gate \(4, 14\)"):
        mla_values(mixed, values, gate[:, 1:])


# ------------------------------------------------------------------ experts


def test_router_bias_changes_the_choice_but_not_the_weights() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    plain, chosen = route(logits, torch.zeros(4), 2, renormalise=False, scale=1.0)
    assert sorted(chosen[0].tolist()) == [0, 1]
    weights, experts = route(
        logits, torch.tensor([0, -9.0, 0, 9.0]), 2, renormalise=False, scale=1.0
    )
    assert sorted(experts[0].tolist()) == [0, 3]
    by_expert = dict(zip(experts[0].tolist(), weights[0].tolist(), strict=True))
    assert by_expert[3] == pytest.approx(float(torch.sigmoid(torch.tensor(-1.0))))
    assert by_expert[0] == pytest.approx(float(plain.max()))


def test_router_renormalises_and_scales() -> None:
    weights, _ = route(normal(5, 8), normal(8), 3, renormalise=True, scale=2.5)
    assert torch.allclose(weights.sum(-1), torch.full((5,), 2.5))


def test_router_survives_vanishing_scores() -> None:
    weights, _ = route(torch.full((1, 4), -200.0), torch.zeros(4), 2, renormalise=True, scale=1.0)
    assert weights.isfinite().all()


@pytest.mark.parametrize("count", [1, 2, 17])
def test_experts_sum_by_weight(count: int) -> None:
    """Idle experts, one favourite expert, and every token's own set."""
    experts, latent, inner, top_k = 5, 6, 4, 2
    w13, w2 = normal(experts, 2 * inner, latent), normal(experts, latent, inner)
    x, weights = normal(count, latent), torch.rand(count, top_k)
    choice = torch.stack([torch.tensor([1, 3 if i % 2 else 4]) for i in range(count)])
    want = torch.zeros(count, latent, dtype=torch.float64)
    for n in range(count):
        for j in range(top_k):
            e = int(choice[n, j])
            hidden = SiluGLU()(w13[e].double() @ x[n].double())
            want[n] += weights[n, j].double() * (w2[e].double() @ hidden.double())
    got = moe_experts(x, weights, choice, FloatExperts(w13=w13, w2=w2), SiluGLU())
    assert relative_error(got, want) < 1e-6
