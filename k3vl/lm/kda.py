"""The Kimi Delta Attention layer.

Projections, short convolutions, decay and write strength, the delta rule, gated output norm.
Source: Kimi K3 ``modeling_kimi_linear.py`` (KimiDeltaAttention); Kimi Linear report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from k3vl.kernels.gated_norm import gated_norm
from k3vl.kernels.kda import kda_decay, kda_decode, kda_prefill, kda_recurrent
from k3vl.kernels.short_conv import short_conv
from k3vl.parameters import linear, parameter

if TYPE_CHECKING:
    from k3vl.config import TextConfig
    from k3vl.lm.batch import Batch
    from k3vl.lm.cache import KDAState


class KimiDeltaAttention(nn.Module):
    """One KDA layer; weights keep K3's meaning, projections of one input are one matrix.

    ``in_proj`` rows: q, k, v (H K each), output gate, decay rank, write logits (H). The output
    gate is full rank in K3 (H K rows); in Kimi-Linear it is a rank that ``gate_b`` expands.
    """

    def __init__(self, config: TextConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate uninitialised weights."""
        super().__init__()
        cfg = config.linear_attn_config
        self.heads, self.head = cfg.num_heads, cfg.head_dim
        self.eps = config.rms_norm_eps
        self.lower_bound = cfg.gate_lower_bound
        # Without the bound a 16-token tile can overflow; the recurrence cannot.
        self.prefill = kda_prefill if cfg.gate_lower_bound is not None else kda_recurrent
        width, rank, d = self.heads * self.head, self.head, config.hidden_size
        gate = width if cfg.use_full_rank_gate else rank
        self.splits = (3 * width, gate, rank, self.heads)
        self.in_proj = linear(d, sum(self.splits), dtype, device)
        self.decay_b = linear(rank, width, dtype, device)
        self.gate_b: nn.Module = (
            nn.Identity() if cfg.use_full_rank_gate else linear(rank, width, dtype, device)
        )
        self.o_proj = linear(width, d, dtype, device)
        self.conv = parameter(3 * width, cfg.short_conv_kernel_size, device=device)
        self.a_log = parameter(self.heads, device=device)
        self.dt_bias = parameter(width, device=device)
        self.o_norm = parameter(self.head, device=device)

    def forward(self, x: torch.Tensor, batch: Batch, state: KDAState) -> torch.Tensor:
        """[N, D] -> [N, D]; advances ``state`` in place."""
        qkv, gate, decay, write = self.in_proj(x).split(self.splits, dim=-1)
        cells = batch.cells[state.index]  # [B, H]
        qkv = self._convolve(qkv, batch, cells, state.windows)
        q, k, v = qkv.float().view(-1, 3, self.heads, self.head).unbind(1)
        q, k = _l2_normalise(q) * self.head**-0.5, _l2_normalise(k)
        g = kda_decay(self.decay_b(decay), self.a_log, self.dt_bias, self.lower_bound)
        beta = torch.sigmoid(write.float())
        out = self._delta_rule((q, k, v, g, beta), batch, cells, state.states)
        return self.o_proj(gated_norm(out, self.gate_b(gate), self.o_norm, self.eps))

    def _convolve(
        self, qkv: torch.Tensor, batch: Batch, cells: torch.Tensor, windows: torch.Tensor
    ) -> torch.Tensor:
        """Short convolutions with the windows of the cells, which advance; [N, 3 H K]."""
        carried = windows[cells].permute(0, 2, 3, 1, 4)  # [B, W-1, 3, H, K]
        own = carried.flatten(2)
        every = torch.arange(cells.shape[0], device=cells.device)
        qkv = short_conv(qkv, self.conv, own, every, batch.taps, batch.tails)
        windows[cells] = own.view_as(carried).permute(0, 3, 1, 2, 4)
        return qkv

    def _delta_rule(
        self,
        inputs: tuple[torch.Tensor, ...],
        batch: Batch,
        cells: torch.Tensor,
        states: torch.Tensor,
    ) -> torch.Tensor:
        """Decoding sequences step, prefilling sequences run the chunked form; [N, H, V].

        ``inputs`` are q, k, v, g [N, H, K] and beta [N, H]; ``states`` [C, K, V], one head a row.
        """
        n = batch.num_decodes
        outputs = []
        if n:  # to the kernel every head is a sequence of its own, with a cell as its slot
            q, k, v, g, beta = (x[:n].reshape(n * self.heads, 1, *x.shape[2:]) for x in inputs)
            out = kda_decode(q, k, v, g, beta, states.unsqueeze(1), cells[:n].flatten())
            outputs.append(out.view(n, self.heads, -1))
        if batch.prefill_lens:
            q, k, v, g, beta = (_pad(x, batch.padded) for x in inputs)
            out, states[cells[n:]] = self.prefill(q, k, v, g, beta, states[cells[n:]])
            outputs.append(out.flatten(0, 1)[batch.packed])
        return torch.cat(outputs)


def _pad(x: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
    """Gather packed rows into [P, T, ...]; the row past the end is zero."""
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, 1))[padded]


def _l2_normalise(x: torch.Tensor) -> torch.Tensor:
    """Unit length over the last axis; the epsilon is inside the root and on the sum."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
