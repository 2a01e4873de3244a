"""Layers of the training model: KDA, MLA, dense and latent-expert MLPs, attention residuals.

Activations are flat, [tokens, width]; attention and the delta rule see rows. Functions under
``@graph`` are compiled; ``torch.compiler.set_stance("force_eager")`` turns that off.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from k3vl.demo.geometry import GATE_LOWER_BOUND, RMS_EPS, SITU_BETA, SITU_LINEAR_BETA

if TYPE_CHECKING:
    from torch import Tensor

    from k3vl.demo.geometry import Geometry

_LORA_EPS = 1e-6

graph = torch.compile(fullgraph=True)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """[..., in] -> [..., out] in the dtype of ``x``; ``weight`` [out, in] is float32."""
    return F.linear(x, weight.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float = RMS_EPS) -> Tensor:
    """RMSNorm over the last axis: statistics and product in float32, result as ``x``."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * weight).to(x.dtype)


def _situ(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.float(), up.float()
    soft = SITU_BETA * torch.tanh(gate / SITU_BETA) * torch.sigmoid(gate)
    return soft * SITU_LINEAR_BETA * torch.tanh(up / SITU_LINEAR_BETA)


def matrix(*shape: int) -> nn.Parameter:
    """A random matrix, or a stack of them, [..., out, in]."""
    return nn.Parameter(torch.randn(*shape) * 0.6 / math.sqrt(shape[-1]))


def ones(width: int) -> nn.Parameter:
    """A norm's weight."""
    return nn.Parameter(torch.ones(width))


# ---------------------------------------------------------------------- KDA


def kda_recurrent(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor
) -> Tensor:
    """The delta rule step by step in float32; the definition, and what a CPU runs.

    Args:
        q, k, v, z: [B, T, H, D]; ``z`` are raw decay logits.
        beta: [B, T, H] write strength in 0..1.
        a_log: [H]; dt_bias: [H * D].
    """
    q, k, v, z = (t.float() for t in (q, k, v, z))
    batch, steps, heads, dim = q.shape
    q = _unit(q) * dim**-0.5
    k = _unit(k)
    scale = a_log.exp()[:, None]
    decay = (GATE_LOWER_BOUND * torch.sigmoid(scale * (z + dt_bias.view(heads, dim)))).exp()
    state = q.new_zeros(batch, heads, dim, dim)
    out = []
    for t in range(steps):
        state = state * decay[:, t, ..., None]
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        write = beta[:, t, :, None].float() * error
        state = state + k[:, t, ..., None] * write[:, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def kda_chunked(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor
) -> Tensor:
    """:func:`kda_recurrent` by the chunked CUDA kernels of ``fla-core``."""
    from fla.ops.kda import chunk_kda

    out: Tensor = chunk_kda(
        q,
        k,
        v,
        z,
        beta,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        safe_gate=True,
        lower_bound=GATE_LOWER_BOUND,
        A_log=a_log,
        dt_bias=dt_bias,
        disable_recompute=True,
    )[0]
    return out


@graph
def _kda_in(
    x: Tensor,
    at: Tensor,
    qkvg: Tensor,
    low: tuple[Tensor, Tensor],
    write: Tensor,
    conv: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Projections and short convolutions; ``at`` [T, 1] keeps the convolution inside its row."""
    width = qkvg.shape[1]
    y = linear(x, qkvg.reshape(-1, x.shape[-1]))
    qkv, gate = y[:, : 3 * width], y[:, 3 * width :]
    taps = conv.shape[1]
    padded = F.pad(qkv, (0, 0, taps - 1, 0))
    mixed = padded[taps - 1 :].float() * conv[:, taps - 1]
    for j in range(taps - 1):
        mixed = mixed + padded[j : j + x.shape[0]].float() * conv[:, j] * (at >= taps - 1 - j)
    mixed = F.silu(mixed).to(x.dtype)
    q, k, v = (mixed[:, i * width : (i + 1) * width].contiguous() for i in range(3))
    z = linear(linear(x, low[0]), low[1])
    beta = torch.sigmoid(linear(x, write).float())
    return q, k, v, z, beta, gate.contiguous()


@graph
def _kda_out(o: Tensor, gate: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
    y = o.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + RMS_EPS) * norm
    y = y.reshape(y.shape[0], -1) * torch.sigmoid(gate.float())
    return linear(y.to(gate.dtype), weight)


class KDA(nn.Module):
    """Kimi Delta Attention."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        width, inner = g.width, g.attention_width
        self.heads, self.dim = g.heads, g.head_dim
        self.qkvg = matrix(4, inner, width)
        self.fa, self.fb = matrix(g.head_dim, width), matrix(inner, g.head_dim)
        self.b, self.o = matrix(g.heads, width), matrix(width, inner)
        # Mostly the current token, so that the layer starts as a projection.
        current = torch.tensor([0.0] * (g.conv - 1) + [0.7])
        self.conv = nn.Parameter(torch.randn(3 * inner, g.conv) * 0.1 + current)
        self.A_log = nn.Parameter(torch.zeros(g.heads))
        self.onorm = ones(g.head_dim)
        # Decays log-uniform between 0.005 and 0.7: memories of 1 to 200 tokens.
        share = torch.exp(torch.empty(inner).uniform_(math.log(0.005), math.log(0.7)))
        share = share / -GATE_LOWER_BOUND
        self.dt_bias = nn.Parameter(torch.log(share / (1 - share)))

    def forward(self, x: Tensor, at: Tensor, rows: int) -> Tensor:
        """[T, d] -> [T, d]; ``rows`` equally long rows."""
        q, k, v, z, beta, gate = _kda_in(x, at, self.qkvg, (self.fa, self.fb), self.b, self.conv)
        q, k, v, z = (t.view(rows, -1, self.heads, self.dim) for t in (q, k, v, z))
        rule = kda_chunked if x.is_cuda else kda_recurrent
        o = rule(q, k, v, z, beta.view(rows, -1, self.heads), self.A_log, self.dt_bias)
        return _kda_out(o.to(x.dtype).reshape(-1, self.heads, self.dim), gate, self.onorm, self.o)


# ---------------------------------------------------------------------- MLA


@graph
def _mla_in(
    x: Tensor,
    query: tuple[Tensor, Tensor, Tensor],
    key_value: tuple[Tensor, Tensor, Tensor],
    heads: int,
    dims: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of all heads; the ``rope`` part is shared and never rotated."""
    nope, rope, value = dims
    q = linear(rms_norm(linear(x, query[0]), query[1], _LORA_EPS), query[2])
    y = linear(x, key_value[0])
    rank = y.shape[-1] - rope
    kv = linear(rms_norm(y[:, :rank], key_value[1], _LORA_EPS), key_value[2])
    kv = kv.reshape(-1, heads, nope + value)
    shared = y[:, None, rank:].expand(-1, heads, rope)
    k = torch.cat([kv[..., :nope], shared], -1)
    return q.reshape(-1, heads, nope + rope), k, kv[..., nope:].contiguous()


@graph
def _mla_out(a: Tensor, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return linear((a.float() * torch.sigmoid(linear(x, gate).float())).to(x.dtype), weight)


class MLA(nn.Module):
    """Multi-head latent attention with an output gate and without positions."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        width, inner = g.width, g.attention_width
        self.heads = g.heads
        self.dims = (g.nope, g.rope, g.head_dim)
        self.qa, self.qan = matrix(g.q_rank, width), ones(g.q_rank)
        self.qb = matrix(g.heads * (g.nope + g.rope), g.q_rank)
        self.kva, self.kvan = matrix(g.kv_rank + g.rope, width), ones(g.kv_rank)
        self.kvb = matrix(g.heads * (g.nope + g.head_dim), g.kv_rank)
        self.g, self.o = matrix(inner, width), matrix(width, inner)

    def forward(self, x: Tensor, at: Tensor, rows: int) -> Tensor:
        """[T, d] -> [T, d]; ``rows`` equally long rows."""
        q, k, v = _mla_in(
            x,
            (self.qa, self.qan, self.qb),
            (self.kva, self.kvan, self.kvb),
            self.heads,
            self.dims,
        )
        q, k, v = (t.unflatten(0, (rows, -1)).transpose(1, 2) for t in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return _mla_out(a.transpose(1, 2).reshape(x.shape[0], -1), x, self.g, self.o)


# ---------------------------------------------------------------------- MLP and latent experts


@graph
def _dense(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    y = linear(x, gate_up.reshape(-1, x.shape[-1]))
    half = y.shape[-1] // 2
    return linear(_situ(y[:, :half], y[:, half:]).to(x.dtype), down)


@graph
def _experts(
    x: Tensor,
    router: tuple[Tensor, Tensor],
    latent: tuple[Tensor, Tensor, Tensor],
    w13: Tensor,
    w2: Tensor,
    shared: tuple[Tensor, Tensor],
    top: int,
) -> tuple[Tensor, Tensor]:
    """Latent experts and the shared one, and the share of tokens that each expert got.

    All experts read the same latent, so E of them are one GLU of width E * inner whose hidden units
    are multiplied by the routing weight: two plain products instead of a gather.
    """
    experts, _, inner = w2.shape
    scores = torch.sigmoid(F.linear(x.float(), router[0]))
    chosen = torch.topk(scores.detach() + router[1], top, -1).indices
    mask = torch.zeros_like(scores).scatter(1, chosen, 1.0)
    share = scores * mask
    share = share / (share.sum(-1, keepdim=True) + 1e-20)
    y = linear(linear(x, latent[0]), w13.reshape(2 * experts * inner, -1))
    half = experts * inner
    hidden = _situ(y[:, :half], y[:, half:]).reshape(-1, experts, inner) * share[..., None]
    joined = w2.permute(1, 0, 2).reshape(w2.shape[1], half)
    out = linear(hidden.reshape(-1, half).to(x.dtype), joined)
    s = linear(x, shared[0].reshape(-1, x.shape[-1]))
    n = s.shape[-1] // 2
    always = linear(_situ(s[:, :n], s[:, n:]).to(x.dtype), shared[1])
    return linear(rms_norm(out, latent[1]), latent[2]) + always, mask.mean(0)


class Experts(nn.Module):
    """LatentMoE; ``load`` keeps the last batch's shares for :meth:`DemoModel.balance`."""

    bias: Tensor

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.top = g.top
        self.router = matrix(g.experts, g.width)
        self.register_buffer("bias", torch.zeros(g.experts))
        self.load = torch.full((g.experts,), g.top / g.experts)
        self.down = matrix(g.latent, g.width)
        self.w13 = matrix(2, g.experts, g.inner, g.latent)
        self.w2 = matrix(g.experts, g.latent, g.inner)
        self.norm, self.up = ones(g.latent), matrix(g.width, g.latent)
        self.sgu = matrix(2, g.shared * g.inner, g.width)
        self.sd = matrix(g.width, g.shared * g.inner)

    def forward(self, x: Tensor) -> Tensor:
        """[T, d] -> [T, d]."""
        out, load = _experts(
            x,
            (self.router, self.bias),
            (self.down, self.norm, self.up),
            self.w13,
            self.w2,
            (self.sgu, self.sd),
            self.top,
        )
        self.load = load.detach()
        return out


class Dense(nn.Module):
    """The first layer's MLP."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.gu, self.down = matrix(2, g.dense, g.width), matrix(g.width, g.dense)

    def forward(self, x: Tensor) -> Tensor:
        """[T, d] -> [T, d]."""
        return _dense(x, self.gu, self.down)


# ---------------------------------------------------------------------- layers


@graph
def mixed_norm(rows: list[Tensor], key: Tensor, norm: Tensor) -> Tensor:
    """RMSNorm of the softmax-weighted sum of rows; ``key`` is norm weight times projection."""
    wide = [row.float() for row in rows]
    scores = torch.stack(
        [(r * key).sum(-1) * torch.rsqrt(r.pow(2).mean(-1) + RMS_EPS) for r in wide], -1
    ).softmax(-1)
    mix = scores[:, :1] * wide[0]
    for i in range(1, len(wide)):
        mix = mix + scores[:, i : i + 1] * wide[i]
    mix = mix * torch.rsqrt(mix.pow(2).mean(-1, keepdim=True) + RMS_EPS) * norm
    return mix.to(rows[0].dtype)


class Layer(nn.Module):
    """Attention and MLP between two attention-residual mixtures."""

    def __init__(self, g: Geometry, index: int) -> None:
        super().__init__()
        self.opens_block = index % g.block == 0
        self.attn: KDA | MLA = MLA(g) if g.is_mla(index) else KDA(g)
        self.mlp: Dense | Experts = Dense(g) if index == 0 else Experts(g)
        self.n1, self.n2, self.rn1, self.rn2 = (ones(g.width) for _ in range(4))
        self.rw1 = nn.Parameter(torch.zeros(g.width))
        self.rw2 = nn.Parameter(torch.zeros(g.width))

    def forward(
        self, bank: list[Tensor], prefix: Tensor, at: Tensor, rows: int
    ) -> tuple[list[Tensor], Tensor]:
        """The bank of block sums and the running sum, before -> after."""
        x = mixed_norm([*bank, prefix], self.rn1 * self.rw1, self.n1)
        y = self.attn(x, at, rows)
        if self.opens_block:
            bank, prefix = [*bank, prefix], y
        else:
            prefix = prefix + y
        return bank, prefix + self.mlp(mixed_norm([*bank, prefix], self.rn2 * self.rw2, self.n2))
