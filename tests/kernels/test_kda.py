"""Kimi Delta Attention: the recurrence, its chunked form, and the decay gate."""

from __future__ import annotations

import pytest
import torch

from k3vl.errors import ShapeError
from k3vl.kernels.kda import kda_decay, kda_decode, kda_prefill, kda_recurrent

pytestmark = pytest.mark.usefixtures("poisoned_memory")

LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 70)


def inputs(
    length: int, decay: float, *, batch: int = 2, heads: int = 3, key: int = 24, value: int = 20
):
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    q, k = (torch.nn.functional.normalize(normal(batch, length, heads, key), dim=-1) for _ in "qk")
    v = normal(batch, length, heads, value)
    spread = torch.rand(batch, length, heads, key, generator=generator)
    g = torch.clamp(decay - 0.01 * spread, -4.9999, -1e-6)
    beta = torch.rand(batch, length, heads, generator=generator)
    state = normal(batch, heads, key, value)
    return q * key**-0.5, k, v, g, beta, state


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.isfinite().all()
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("decay", [-4.99, -2.0, -0.1, -1e-4])
@pytest.mark.parametrize("length", LENGTHS)
def test_chunked_form_is_the_recurrence(length: int, decay: float) -> None:
    args = inputs(length, decay)
    want, want_state = kda_recurrent(*(x.double() for x in args))
    for form in (kda_prefill, kda_recurrent):
        out, state = form(*args)
        assert relative_error(out, want) < 1e-5
        assert relative_error(state, want_state) < 1e-5


@pytest.mark.parametrize("decay", [-4.99, -0.05])
def test_any_split_gives_the_same_state(decay: float) -> None:
    args = inputs(70, decay)
    *sequence, state = args
    whole, final = kda_prefill(*args)
    for first in (1, 2, 3, 16, 33, 69):
        head, middle = kda_prefill(*(x[:, :first] for x in sequence), state)
        tail, end = kda_prefill(*(x[:, first:] for x in sequence), middle)
        assert relative_error(torch.cat([head, tail], 1), whole.double()) < 1e-5
        assert relative_error(end, final.double()) < 1e-5


def test_decay_can_differ_wildly_between_channels() -> None:
    """A channel that forgets at once beside one that never does, over a whole tile."""
    q, k, v, g, beta, state = inputs(48, -1.0)
    g = torch.where(torch.arange(g.shape[-1]) % 2 == 0, -4.9999, -1e-7).expand_as(g)
    want, want_state = kda_recurrent(*(x.double() for x in (q, k, v, g, beta, state)))
    out, final = kda_prefill(q, k, v, g, beta, state)
    assert relative_error(out, want) < 1e-5
    assert relative_error(final, want_state) < 1e-5


def test_padding_leaves_the_state_alone() -> None:
    *sequence, state = inputs(20, -0.5)
    _, want = kda_prefill(*(x[:, :13] for x in sequence), state)
    q, k, v, g, beta = (x.clone() for x in sequence)
    for x in (k, g, beta):
        x[:, 13:] = 0
    _, got = kda_prefill(q, k, v, g, beta, state)
    assert relative_error(got, want.double()) < 1e-6


def test_decode_updates_only_its_slots() -> None:
    q, k, v, g, beta, state = inputs(1, -0.7, batch=3)
    pool = torch.randn(8, *state.shape[1:])
    slots = torch.tensor([6, 0, 3])
    before = pool.clone()
    want, want_state = kda_recurrent(q, k, v, g, beta, pool[slots])
    out = kda_decode(*(x[:, 0] for x in (q, k, v, g, beta)), pool, slots)
    assert relative_error(out, want[:, 0].double()) < 1e-6
    assert relative_error(pool[slots], want_state.double()) < 1e-6
    others = torch.tensor([1, 2, 4, 5, 7])
    assert torch.equal(pool[others], before[others])


def test_output_reads_the_state_after_the_write() -> None:
    """From an empty state one token's output is (q . k) beta v: zero if read before the write."""
    q, k, v, g, beta, state = inputs(1, -3.0)
    out, _ = kda_prefill(q, k, v, g, beta, torch.zeros_like(state))
    want = (q * k).sum(-1, keepdim=True) * beta.unsqueeze(-1) * v
    assert relative_error(out, want.double()) < 1e-5


def test_error_is_taken_against_the_decayed_state() -> None:
    """With v equal to what the undecayed state answers, the write must not vanish."""
    q, k, v, g, beta, state = inputs(1, -2.0)
    v = torch.einsum("bhkv,bthk->bthv", state, k)
    _, got = kda_recurrent(q, k, v, g, beta, state)
    decayed = state * g[:, 0].exp().unsqueeze(-1)
    u = beta[:, 0].unsqueeze(-1) * (v[:, 0] - torch.einsum("bhkv,bhk->bhv", decayed, k[:, 0]))
    want = decayed + k[:, 0].unsqueeze(-1) * u.unsqueeze(-2)
    assert u.abs().max() > 0.1
    assert relative_error(got, want.double()) < 1e-5


def test_bounded_gate_is_a_sigmoid_not_a_clamp() -> None:
    heads, key = 2, 4
    a_log, dt_bias = torch.tensor([0.3, -1.0]), torch.linspace(-1, 1, heads * key)
    logits = torch.linspace(-30, 30, 5 * heads * key).view(5, -1)
    g = kda_decay(logits, a_log, dt_bias, -5.0)
    assert g.shape == (5, heads, key)
    assert float(g.min()) >= -5
    assert float(g.max()) <= 0
    shifted = (logits + dt_bias).view(5, heads, key).double()
    want = -5 / (1 + torch.exp(-a_log.double().exp().view(heads, 1) * shifted))
    assert relative_error(g, want) < 1e-6
    clamp = torch.clamp(-a_log.exp().view(heads, 1) * torch.nn.functional.softplus(shifted), -5)
    assert float((g - clamp).abs().max()) > 0.5, "the two forms differ where it matters"


def test_decay_rate_is_per_head() -> None:
    """Equal logits: all channels of a head agree, heads differ by A_log."""
    g = kda_decay(torch.ones(1, 12), torch.tensor([0.0, 1.0, -2.0]), torch.zeros(12), -5.0)
    assert torch.equal(g, g[..., :1].expand_as(g))
    assert len(set(g[0, :, 0].tolist())) == 3


def test_unbounded_gate_of_kimi_linear() -> None:
    g = kda_decay(torch.tensor([[100.0, -100.0]]), torch.zeros(1), torch.zeros(2), None)
    assert g[0, 0, 0] == -100
    assert -1e-6 < float(g[0, 0, 1]) <= 0


def test_shapes_are_checked() -> None:
    q, k, v, g, beta, state = inputs(4, -1.0)
    with pytest.raises(ShapeError, match=r"kda_prefill: q \(2, 4, 3, 24\).*state \(2, 3, 20, 24\)"):
        kda_prefill(q, k, v, g, beta, state.mT)
    with pytest.raises(ShapeError, match="kda_decay"):
        kda_decay(torch.zeros(2, 8), torch.zeros(3), torch.zeros(8), -5.0)
