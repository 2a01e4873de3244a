"""The compiled CPU kernels: against float64, row by row to the bit, with poison around them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from numba import njit
from torch.nn import functional as F

from k3vl.errors import ShapeError
from k3vl.kernels.choice import choose, cpu_kernels, reference_kernels
from k3vl.kernels.compiled import COMMON, EXACT, exp, floats, sigmoid, sources_digest, tanh
from k3vl.kernels.gated_mlp import GatedMLPWeights
from k3vl.kernels.mla.cpu import MLACPU
from k3vl.kernels.moe.experts import FloatExperts
from k3vl.kernels.moe.latent import MoEWeights
from k3vl.kernels.rms_norm import cpu as rms_norm_on_cpu
from k3vl.kernels.situ import GatedActivation, SiluGLU, SituGLU
from k3vl.kernels.situ.cpu import glu_cpu

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CPU = cpu_kernels("tests")
SITU = SituGLU(beta=4.0, linear_beta=25.0)
NAN = float("nan")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.isfinite().all()
    return float((got.double() - want).norm() / want.norm())


def columns(x: torch.Tensor) -> torch.Tensor:
    """The same rows as columns of a wider matrix whose other columns are not numbers."""
    wide = torch.full((x.shape[0], x.shape[1] + 5), NAN)
    wide[:, 3 : 3 + x.shape[1]] = x
    return wide[:, 3 : 3 + x.shape[1]]


# ------------------------------------------------------------------ elementary functions


@njit(fastmath=EXACT, error_model="numpy")
def _each(which: int, x: int, y: int, count: int) -> None:
    given, to = floats(x, count), floats(y, count)
    for i in range(count):
        if which == 0:
            to[i] = exp(given[i])
        elif which == 1:
            to[i] = tanh(given[i])
        else:
            to[i] = sigmoid(given[i])


@pytest.mark.parametrize(
    ("which", "want"),
    [(0, torch.exp), (1, torch.tanh), (2, torch.sigmoid)],
    ids=["exp", "tanh", "s"],
)
def test_elementary_functions_to_the_last_digits(which: int, want) -> None:
    x = torch.cat([torch.linspace(-86, 86, 20_001), torch.linspace(-2, 2, 20_001)])
    x = torch.cat([x, torch.tensor([1e-30, -1e-30, 1e-4])])
    got = torch.empty_like(x)
    _each(which, x.data_ptr(), got.data_ptr(), len(x))
    exact = want(x.double())
    assert float(((got - exact) / exact.abs().clamp_min(1e-37)).abs().max()) < 4e-7


def test_elementary_functions_at_the_ends() -> None:
    x = torch.tensor([NAN, math.inf, -math.inf, 1e4, -1e4])
    got = torch.empty_like(x)
    _each(0, x.data_ptr(), got.data_ptr(), len(x))
    assert got[0].isnan()
    assert (got[[1, 3]] > 1e38).all()
    assert (got[[2, 4]] < 1e-37).all()
    for which, low in ((1, -1), (2, 0)):
        _each(which, x.data_ptr(), got.data_ptr(), len(x))
        assert got[0].isnan()
        assert got[[1, 3]].tolist() == [1, 1]
        assert got[[2, 4]] == pytest.approx(torch.tensor([low, low]).float(), abs=1e-37)


# ------------------------------------------------------------------ each op against float64


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize(("inner", "outputs"), [(1, 1), (3, 2), (16, 17), (64, 8), (700, 19)])
def test_linear(rows: int, inner: int, outputs: int) -> None:
    x, weight = normal(rows, inner), normal(outputs, inner)
    got = CPU.linear(columns(x), weight)
    assert got.shape == (rows, outputs)
    if rows:
        assert relative_error(got, x.double() @ weight.double().t()) < 1e-6


@pytest.mark.parametrize("width", [1, 7, 33])
def test_rms_norm(width: int) -> None:
    x, weight = normal(3, width) * 0.1, normal(width)
    want = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-2)
    want = want * weight.double()
    assert relative_error(CPU.rms_norm(columns(x), weight, 1e-2), want) < 1e-6
    assert CPU.rms_norm(x.view(3, 1, width), weight, 1e-2).shape == (3, 1, width)


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("width", [3, 40])
def test_attention_residual(depth: int, width: int) -> None:
    bank = torch.full((depth + 1, 6, width), NAN)  # a row that is not live yet
    bank[:depth] = normal(depth, 6, width) * 3
    query, weight = normal(width), normal(width, seed=1)
    r = bank[:depth].double()
    scores = (r * query.double()).sum(-1) * torch.rsqrt(r.square().mean(-1) + 1e-5)
    mixed = (scores.softmax(0).unsqueeze(-1) * r).sum(0)
    want = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert relative_error(CPU.attn_residual(bank[:depth], query, weight, 1e-5), want) < 2e-6


def activate(gate_up: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
    g, u = gate_up.double().chunk(2, -1)
    if isinstance(activation, SiluGLU):
        return F.silu(g) * u
    return 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)


def mlp_weights(gate_up, down, activation: GatedActivation) -> GatedMLPWeights:
    return GatedMLPWeights(gate_up=gate_up, down=down, activation=activation)


@pytest.mark.parametrize("activation", [SITU, SiluGLU()])
@pytest.mark.parametrize(("rows", "width", "inner"), [(1, 5, 3), (6, 33, 20)])
def test_gated_mlp(rows: int, width: int, inner: int, activation: GatedActivation) -> None:
    x, gate_up, down = normal(rows, width), normal(2 * inner, width), normal(width, inner)
    hidden = x.double() @ gate_up.double().t()
    want = activate(hidden, activation) @ down.double().t()
    assert (
        relative_error(CPU.gated_mlp(columns(x), mlp_weights(gate_up, down, activation)), want)
        < 1e-6
    )
    assert relative_error(glu_cpu(hidden.float(), activation), activate(hidden, activation)) < 1e-6


def moe_weights(
    *, latent: int | None, norm: bool, activation: GatedActivation
) -> MoEWeights[FloatExperts]:
    width, experts, inner, shared = 18, 6, 7, 9
    inside = latent or width
    return MoEWeights(
        router=normal(experts, width),
        router_bias=normal(experts),
        down=normal(inside, width) if latent else None,
        experts=FloatExperts(
            w13=normal(experts, 2 * inner, inside), w2=normal(experts, inside, inner)
        ),
        norm=normal(inside) if norm else None,
        up=normal(width, inside, seed=1) if latent else None,
        shared_gate_up=normal(2 * shared, width),
        shared_down=normal(width, shared),
        activation=activation,
        top_k=2,
        renormalise=norm,
        scale=1.5,
        eps=1e-5,
    )


def moe_by_hand(x: torch.Tensor, w: MoEWeights[FloatExperts]) -> torch.Tensor:
    """One row in float64."""
    x = x.double()
    scores = torch.sigmoid(w.router.double() @ x)
    chosen = (scores + w.router_bias).topk(w.top_k).indices
    shares = scores[chosen]
    if w.renormalise:
        shares = shares / shares.sum()
    latent = x if w.down is None else w.down.double() @ x
    routed = torch.zeros_like(latent)
    for share, e in zip(shares, chosen.tolist(), strict=True):
        hidden = activate(w.experts.w13[e].double() @ latent, w.activation)
        routed += w.scale * share * (w.experts.w2[e].double() @ hidden)
    if w.norm is not None:
        routed = routed * torch.rsqrt(routed.square().mean() + w.eps) * w.norm.double()
    if w.up is not None:
        routed = w.up.double() @ routed
    shared = activate(w.shared_gate_up.double() @ x, w.activation)
    return routed + w.shared_down.double() @ shared


@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize(("latent", "norm"), [(None, False), (11, True)])
@pytest.mark.parametrize("kernels", [CPU, reference_kernels("tests")], ids=["cpu", "reference"])
def test_latent_moe(kernels, rows: int, latent: int | None, norm: bool) -> None:
    weights = moe_weights(latent=latent, norm=norm, activation=SITU if latent else SiluGLU())
    x = normal(rows, 18)
    want = torch.stack([moe_by_hand(row, weights) for row in x])
    assert relative_error(kernels.latent_moe(columns(x), weights), want) < 2e-6


def test_idle_experts_have_no_influence() -> None:
    weights = moe_weights(latent=11, norm=True, activation=SITU)
    x = normal(1, 18)
    want = CPU.latent_moe(x, weights)
    scores = torch.sigmoid(weights.router @ x[0]) + weights.router_bias
    for e in scores.argsort()[:-2]:
        weights.experts.w13[e], weights.experts.w2[e] = NAN, NAN
    assert torch.equal(CPU.latent_moe(x, weights), want)


HEADS, NOPE, SHARED, VALUE, LATENT = 3, 6, 2, 5, 9


def attend(q, kv_b, context) -> torch.Tensor:
    """One query over its context in float64, keys and values expanded."""
    expanded = torch.einsum("hnr,lr->hln", kv_b.double(), context[:, :LATENT].double())
    shared = context[:, LATENT:].double().expand(HEADS, -1, -1)
    keys = torch.cat([expanded[..., :NOPE], shared], dim=-1)
    weights = (torch.einsum("hk,hlk->hl", q.double(), keys) * 0.3).softmax(-1)
    return torch.einsum("hl,hlv->hv", weights, expanded[..., NOPE:])


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (1, 7), (3, 7), (7, 8)])
def test_mla_prefill_is_causal_behind_a_prefix(queries: int, keys: int) -> None:
    pool = torch.full((20, LATENT + SHARED), NAN)
    rows = torch.randperm(20, generator=torch.Generator().manual_seed(keys))[:keys]
    pool[rows] = normal(keys, LATENT + SHARED)
    q = columns(normal(queries, HEADS * (NOPE + SHARED))).unflatten(1, (HEADS, -1))
    kv_b = normal(HEADS, NOPE + VALUE, LATENT)
    got = MLACPU().prefill(q, kv_b, pool, rows, 0.3)
    for t in range(queries):
        want = attend(q[t], kv_b, pool[rows[: keys - queries + t + 1]])
        assert relative_error(got[t], want) < 1e-6


def test_mla_decode_ignores_whatever_lies_past_the_end() -> None:
    pool = normal(12, LATENT + SHARED)
    pool[[3, 9]] = NAN
    q, kv_b = normal(2, HEADS, NOPE + SHARED), normal(HEADS, NOPE + VALUE, LATENT)
    rows = torch.tensor([[4, 2, 7, 11, 0], [8, 1, 3, 9, 9]])
    lengths = torch.tensor([5, 2])
    got = MLACPU().decode(q, kv_b, pool, rows, lengths, 0.3)
    for i, length in enumerate(lengths.tolist()):
        want = attend(q[i], kv_b, pool[rows[i, :length]])
        assert relative_error(got[i], want) < 1e-6
        alone = MLACPU().prefill(q[i : i + 1], kv_b, pool, rows[i, :length], 0.3)
        assert torch.equal(got[i], alone[0]), "decode and prefill agree to the bit"


# ------------------------------------------------------------------ rows


def cases() -> dict[str, object]:
    weights = moe_weights(latent=11, norm=True, activation=SITU)
    matrix, norm = normal(13, 18), normal(18)
    mlp = mlp_weights(weights.shared_gate_up, weights.shared_down, SITU)
    return {
        "linear": lambda x: CPU.linear(x, matrix),
        "rms_norm": lambda x: CPU.rms_norm(x, norm, 1e-5),
        "attn_residual": lambda x: CPU.attn_residual(
            torch.stack([x, 2 * x.flip(1)]), norm, norm, 1e-5
        ),
        "latent_moe": lambda x: CPU.latent_moe(x, weights),
        "gated_mlp": lambda x: CPU.gated_mlp(x, mlp),
    }


@pytest.mark.parametrize("name", cases())
def test_no_row_depends_on_another(name: str) -> None:
    """To the bit, at every place in a block of rows, beside one that is not a number."""
    op = cases()[name]
    x = normal(23, 18)
    alone = torch.cat([op(x[i : i + 1]) for i in range(23)])
    for first, last in ((0, 23), (1, 4), (3, 20), (5, 7), (2, 23)):
        assert torch.equal(op(x[first:last]), alone[first:last])
    apart = [torch.cat([torch.zeros(23, shift), x], 1)[:, shift:] for shift in (1, 3, 7)]
    assert all(torch.equal(op(same), alone) for same in apart), "wherever it lies in memory"
    x[4] = NAN
    together = op(x)
    assert together[4].isnan().all()
    others = torch.arange(23) != 4
    assert torch.equal(together[others], alone[others])


# ------------------------------------------------------------------ the choice


def test_what_does_not_fit_is_refused() -> None:
    x, w = normal(2, 18), moe_weights(latent=11, norm=True, activation=SITU)
    with pytest.raises(ShapeError, match=r"linear: x \(2, 18\) and weight \(3, 17\)"):
        CPU.linear(x, normal(3, 17))
    with pytest.raises(ShapeError, match=r"latent_moe: x \(2, 17\)"):
        CPU.latent_moe(x[:, 1:], w)
    with pytest.raises(ShapeError, match=r"gated_mlp: x \(2, 17\)"):
        CPU.gated_mlp(x[:, 1:], mlp_weights(w.shared_gate_up, w.shared_down, SITU))
    with pytest.raises(ShapeError, match=r"attn_residual: rows \(1, 2, 18\), query \(17,\)"):
        CPU.attn_residual(x.unsqueeze(0), normal(17), normal(17), 1e-5)
    with pytest.raises(ShapeError, match=r"rms_norm: x \(2, 18\) and weight \(17,\)"):
        CPU.rms_norm(x, normal(17), 1e-5)
    with pytest.raises(ShapeError, match="gate and up halves"):
        glu_cpu(normal(2, 3), SITU)
    q, kv_b = normal(2, HEADS, NOPE + SHARED), normal(HEADS, NOPE + VALUE, LATENT)
    pool, rows = normal(5, LATENT + SHARED), torch.tensor([1])
    with pytest.raises(ShapeError, match=r"mla: q \(2, 3, 8\), rows \(1,\)"):
        MLACPU().prefill(q, kv_b, pool, rows, 0.3)
    with pytest.raises(ShapeError, match=r"mla: q \(2, 3, 8\), rows \(1, 1\), lengths \(1,\)"):
        MLACPU().decode(q, kv_b, pool, rows.unsqueeze(0), rows, 0.3)
    with pytest.raises(ShapeError, match=r"mla: q .*, kv_b \(3, 11, 9\), latents \(5, 8\)"):
        MLACPU().prefill(q, kv_b, pool[:, 3:], torch.tensor([1, 2]), 0.3)


def test_the_choice_is_one_value_with_a_reason(monkeypatch) -> None:
    where = torch.device("cpu")
    assert choose(where, torch.float32).name == "cpu"
    other = choose(where, torch.bfloat16)
    assert (other.name, other.reason) == (
        "reference",
        "nothing else is written for bfloat16 on cpu",
    )
    monkeypatch.setattr("k3vl.kernels.choice.find_spec", lambda name: None)
    without = choose(where, torch.float32)
    assert without.name == "reference"
    assert "numba" in without.reason


def test_kept_code_belongs_to_the_text_of_all_kernels(tmp_path: Path) -> None:
    helper, kernel = tmp_path / COMMON[0], tmp_path / "op" / "cpu.py"
    kernel.parent.mkdir()
    for name in COMMON:
        (tmp_path / name).write_text("one")
    kernel.write_text("two")
    before = sources_digest(tmp_path)
    helper.write_text("else")
    assert sources_digest(tmp_path) != before
    helper.write_text("one")
    assert sources_digest(tmp_path) == before


def test_kernels_are_kept_under_that_name() -> None:
    folder = Path(rms_norm_on_cpu.__file__).parents[1]
    kept = rms_norm_on_cpu._rms_norm.stats.cache_path
    assert f"compiled-{sources_digest(folder)}" in kept
