"""Kimi Delta Attention: the recurrence, its chunked form, the decay gate, and the whole op."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from torch.nn import functional as F

from k3vl.errors import ShapeError
from k3vl.kernels.kda import KDAWeights, kda_decode, kda_prefill
from k3vl.kernels.kda.cpu import kda_decode_cpu, kda_prefill_cpu
from k3vl.kernels.kda.delta_rule import delta_rule_chunk, delta_rule_recurrent
from k3vl.kernels.kda.reference import kda_decay

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
    want, want_state = delta_rule_recurrent(*(x.double() for x in args))
    for form in (delta_rule_chunk, delta_rule_recurrent):
        out, state = form(*args)
        assert relative_error(out, want) < 1e-5
        assert relative_error(state, want_state) < 1e-5


@pytest.mark.parametrize("decay", [-4.99, -0.05])
def test_any_split_gives_the_same_state(decay: float) -> None:
    args = inputs(70, decay)
    *sequence, state = args
    whole, final = delta_rule_chunk(*args)
    for first in (1, 2, 3, 16, 33, 69):
        head, middle = delta_rule_chunk(*(x[:, :first] for x in sequence), state)
        tail, end = delta_rule_chunk(*(x[:, first:] for x in sequence), middle)
        assert relative_error(torch.cat([head, tail], 1), whole.double()) < 1e-5
        assert relative_error(end, final.double()) < 1e-5


def test_decay_can_differ_wildly_between_channels() -> None:
    """A channel that forgets at once beside one that never does, over a whole tile."""
    q, k, v, g, beta, state = inputs(48, -1.0)
    g = torch.where(torch.arange(g.shape[-1]) % 2 == 0, -4.9999, -1e-7).expand_as(g)
    want, want_state = delta_rule_recurrent(*(x.double() for x in (q, k, v, g, beta, state)))
    out, final = delta_rule_chunk(q, k, v, g, beta, state)
    assert relative_error(out, want) < 1e-5
    assert relative_error(final, want_state) < 1e-5


def test_padding_leaves_the_state_alone() -> None:
    *sequence, state = inputs(20, -0.5)
    _, want = delta_rule_chunk(*(x[:, :13] for x in sequence), state)
    q, k, v, g, beta = (x.clone() for x in sequence)
    for x in (k, g, beta):
        x[:, 13:] = 0
    _, got = delta_rule_chunk(q, k, v, g, beta, state)
    assert relative_error(got, want.double()) < 1e-6


def test_output_reads_the_state_after_the_write() -> None:
    """From an empty state one token's output is (q . k) beta v: zero if read before the write."""
    q, k, v, g, beta, state = inputs(1, -3.0)
    out, _ = delta_rule_chunk(q, k, v, g, beta, torch.zeros_like(state))
    want = (q * k).sum(-1, keepdim=True) * beta.unsqueeze(-1) * v
    assert relative_error(out, want.double()) < 1e-5


def test_error_is_taken_against_the_decayed_state() -> None:
    """With v equal to what the undecayed state answers, the write must not vanish."""
    q, k, v, g, beta, state = inputs(1, -2.0)
    v = torch.einsum("bhkv,bthk->bthv", state, k)
    _, got = delta_rule_recurrent(q, k, v, g, beta, state)
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


# ------------------------------------------------------------------ the whole op

HEADS, HEAD, WIDTH = 3, 8, 4


@dataclass
class Layer:
    """Random weights, a pool of twenty cells, and packed rows; some columns of one projection."""

    rows: int
    lower_bound: float | None = -5.0
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.rows)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        channels = HEADS * HEAD
        projected = normal(self.rows, 5 * channels + HEADS).to(self.dtype)
        self.columns = projected.split([3 * channels, channels, channels, HEADS], dim=-1)
        self.weights = KDAWeights(
            conv=normal(3 * channels, WIDTH),
            a_log=normal(HEADS) * 0.5,
            dt_bias=normal(channels),
            o_norm=1 + 0.2 * normal(HEAD),
            eps=1e-5,
            lower_bound=self.lower_bound,
        )
        self.windows = normal(20, WIDTH - 1, 3, HEAD).to(self.dtype)
        self.states = normal(20, HEAD, HEAD)

    def want(self, cells: list[int], begin: int, end: int) -> torch.Tensor:
        """One sequence token by token in float64, from the pool; the pool stays as it is."""
        qkv, gate, decay, write = (x[begin:end].double() for x in self.columns)
        w = {k: getattr(self.weights, k).double() for k in ("conv", "a_log", "dt_bias", "o_norm")}
        outputs = torch.zeros(end - begin, HEADS, HEAD, dtype=torch.float64)
        self.final = {}
        for h, cell in enumerate(cells):
            mine = slice(h * HEAD, (h + 1) * HEAD)
            convolved = []
            for part in range(3):
                channels = slice((part * HEADS + h) * HEAD, (part * HEADS + h + 1) * HEAD)
                line = torch.cat([self.windows[cell, :, part].double(), qkv[:, channels]])
                taps = torch.stack([line[j : j + end - begin] for j in range(WIDTH)])
                convolved.append(F.silu((taps * w["conv"][channels].t().unsqueeze(1)).sum(0)))
                self.final[cell, part] = line[-(WIDTH - 1) :]
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in convolved[:2])
            logits = w["a_log"][h].exp() * (decay[:, mine] + w["dt_bias"][mine])
            if self.lower_bound is None:
                logits = -w["a_log"][h].exp() * F.softplus(decay[:, mine] + w["dt_bias"][mine])
                g = logits
            else:
                g = self.lower_bound * torch.sigmoid(logits)
            state, beta = self.states[cell].double(), torch.sigmoid(write[:, h])
            for t in range(end - begin):
                state = state * g[t].exp().unsqueeze(-1)
                u = beta[t] * (convolved[2][t] - k[t] @ state)
                state = state + torch.outer(k[t], u)
                outputs[t, h] = HEAD**-0.5 * (q[t] @ state)
            self.final[cell, "state"] = state
        scale = (outputs.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return (outputs * scale * w["o_norm"]).flatten(1) * torch.sigmoid(gate)

    def check_pool(self, cells: list[int]) -> None:
        """The cells hold what :meth:`want` arrived at."""
        for cell in cells:
            assert relative_error(self.states[cell], self.final[cell, "state"]) < 1e-5
            for part in range(3):
                assert torch.equal(self.windows[cell, :, part].double(), self.final[cell, part])


@pytest.mark.parametrize("decode", [kda_decode, kda_decode_cpu])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_decode_is_one_token_of_the_recurrence(
    decode, batch: int, lower_bound: float | None
) -> None:
    layer = Layer(batch, lower_bound)
    cells = torch.randperm(20, generator=torch.Generator().manual_seed(batch))[: batch * HEADS]
    cells = cells.view(batch, HEADS)
    others = [c for c in range(20) if c not in cells]
    before = layer.windows.clone(), layer.states.clone()
    wants, finals = [], {}
    for i in range(batch):
        wants.append(layer.want(cells[i].tolist(), i, i + 1))
        finals |= layer.final
    layer.final = finals
    out = decode(*layer.columns, layer.weights, layer.windows, layer.states, cells)
    assert relative_error(out, torch.cat(wants)) < 1e-5
    layer.check_pool(cells.flatten().tolist())
    assert torch.equal(layer.windows[others], before[0][others])
    assert torch.equal(layer.states[others], before[1][others])


@pytest.mark.parametrize("prefill", [kda_prefill, kda_prefill_cpu])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize(
    "lengths", [((1, 0),), ((5, 0), (1, 0)), ((2, 14), (17, 0), (40, 8)), ((3, 1), (1, 15))]
)
def test_prefill_is_the_recurrence_of_every_sequence(
    prefill, lengths: tuple[tuple[int, int], ...], lower_bound: float | None
) -> None:
    """Lengths and padding behind them; what is in the padding is not a number."""
    starts = [0, *accumulate(n + pad for n, pad in lengths)]
    layer = Layer(starts[-1], lower_bound)
    cells = torch.randperm(20, generator=torch.Generator().manual_seed(7))[: len(lengths) * HEADS]
    cells = cells.view(-1, HEADS)
    others = [c for c in range(20) if c not in cells]
    layer.states[others] = float("nan")
    ends, wants, finals = [], [], {}
    for i, (n, pad) in enumerate(lengths):
        ends.append(starts[i] + n)
        wants.append(layer.want(cells[i].tolist(), starts[i], ends[i]))
        finals |= layer.final
        wants.append(torch.zeros(pad, HEADS * HEAD, dtype=torch.float64))
        for x in layer.columns:
            x[ends[i] : starts[i + 1]] = float("nan")
    layer.final = finals
    out = prefill(
        *layer.columns,
        layer.weights,
        layer.windows,
        layer.states,
        cells,
        torch.tensor(starts),
        torch.tensor(ends),
    )
    assert relative_error(out, torch.cat(wants)) < 1e-5
    layer.check_pool(cells.flatten().tolist())


@pytest.mark.parametrize("pieces", [(13, 17), (1, 29), (2, 1, 27), (1,) * 30])
def test_any_cut_gives_the_same_bits_on_a_cpu(pieces: tuple[int, ...]) -> None:
    """Pieces of one token are decoded, beside a stranger; the others are prefilled."""
    whole, cut = Layer(30), Layer(30)
    cells = torch.tensor([[3, 0, 7]])
    ends = torch.tensor([30])
    args = whole.weights, whole.windows, whole.states, cells, torch.tensor([0, 30]), ends
    want = kda_prefill_cpu(*whole.columns, *args)
    outputs, done = [], 0
    for n in pieces:
        columns = [x[done : done + n] for x in cut.columns]
        pool = cut.weights, cut.windows, cut.states
        if n == 1:
            stranger = Layer(7)
            columns = [
                torch.cat([x, y[:1]]) for x, y in zip(columns, stranger.columns, strict=True)
            ]
            both = torch.cat([cells, torch.tensor([[10, 11, 12]])])
            outputs.append(kda_decode_cpu(*columns, *pool, both)[:1])
        else:
            borders = torch.tensor([0, n])
            outputs.append(kda_prefill_cpu(*columns, *pool, cells, borders, borders[1:]))
        done += n
    assert torch.equal(torch.cat(outputs), want)
    assert torch.equal(cut.states[cells], whole.states[cells])
    assert torch.equal(cut.windows[cells], whole.windows[cells])


def test_write_strength_is_float32() -> None:
    """Beta rounded to bfloat16 lets an error build up in the state."""
    layer = Layer(1, dtype=torch.bfloat16)
    layer.states.zero_()
    cells = [4, 1, 8]
    layer.want(cells, 0, 1)
    kda_decode(*layer.columns, layer.weights, layer.windows, layer.states, torch.tensor([cells]))
    layer.check_pool(cells)


def test_shapes_are_checked() -> None:
    for decode, prefill in ((kda_decode, kda_prefill), (kda_decode_cpu, kda_prefill_cpu)):
        refuses(decode, prefill)


def refuses(decode, prefill) -> None:
    layer, cells = Layer(2), torch.tensor([[1, 2, 3], [4, 5, 6]])
    qkv, gate, decay, write = layer.columns
    pool = layer.weights, layer.windows, layer.states
    with pytest.raises(ShapeError, match=r"kda_decode: qkv \(2, 71\).*states \(20, 8, 8\)"):
        decode(qkv[:, 1:], gate, decay, write, *pool, cells)
    with pytest.raises(ShapeError, match=r"kda_decode: qkv \(2, 72\), cells \(1, 3\)"):
        decode(qkv, gate, decay, write, *pool, cells[:1])
    with pytest.raises(ShapeError, match=r"kda_prefill: cells \(2, 3\), cu_seqlens \(2,\)"):
        prefill(qkv, gate, decay, write, *pool, cells, torch.tensor([0, 2]), torch.tensor([1, 2]))
