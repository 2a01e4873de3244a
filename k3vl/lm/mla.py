"""The gated multi-head latent attention layer, without positions.

Source: Kimi K3 ``modeling_kimi_linear.py`` (KimiMLAAttention with ``mla_use_nope``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from k3vl.lm.layers import RMSNorm
from k3vl.parameters import linear, parameter

if TYPE_CHECKING:
    from k3vl.config import TextConfig
    from k3vl.kernels.choice import Kernels
    from k3vl.lm.batch import Batch

LOW_RANK_EPS = 1e-6
"""The two low-rank norms are built without an epsilon and get their class's own, not config's."""


class LowRankQuery(nn.Module):
    """Norm and expansion of the query's low rank."""

    def __init__(
        self, rank: int, width: int, kernels: Kernels, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate uninitialised weights."""
        super().__init__()
        self.kernels = kernels
        self.norm = RMSNorm(rank, LOW_RANK_EPS, kernels, dtype=dtype, device=device)
        self.expand = linear(rank, width, dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, rank] -> [N, H K]."""
        return self.kernels.linear(self.norm(x), self.expand.weight)


class MultiHeadLatentAttention(nn.Module):
    """One MLA layer. ``in_proj`` rows: query rank, latent, shared key part, output gate."""

    def __init__(
        self, config: TextConfig, kernels: Kernels, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate uninitialised weights."""
        super().__init__()
        self.kernels = kernels
        self.heads, self.nope, self.rope = (
            config.num_attention_heads,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
        )
        self.value, self.latent = config.v_head_dim, config.kv_lora_rank
        self.scale = (self.nope + self.rope) ** -0.5
        d, width = config.hidden_size, self.heads * self.value
        query = self.heads * (self.nope + self.rope)
        rank = config.q_lora_rank
        gate = width if config.mla_use_output_gate else 0
        self.splits = (rank or query, self.latent, self.rope, gate)
        self.in_proj = linear(d, sum(self.splits), dtype, device)
        self.query: LowRankQuery | nn.Identity = nn.Identity()  # no rank: in_proj makes queries
        if rank:
            self.query = LowRankQuery(rank, query, kernels, dtype=dtype, device=device)
        self.kv_norm = RMSNorm(self.latent, LOW_RANK_EPS, kernels, dtype=dtype, device=device)
        # [H, nope + V, R]: every head's key rows, then its value rows, as in the checkpoint.
        self.kv_b = parameter(
            self.heads, self.nope + self.value, self.latent, dtype=dtype, device=device
        )
        self.gate = _sigmoid_gate if config.mla_use_output_gate else _no_gate
        self.o_proj = linear(width, d, dtype, device)

    def forward(self, x: torch.Tensor, batch: Batch, latents: torch.Tensor) -> torch.Tensor:
        """[N, D] -> [N, D]; writes the new tokens' rows of ``latents`` [S, R + P]."""
        projected = self.kernels.linear(x, self.in_proj.weight)
        q, c, k_shared, gate = projected.split(self.splits, dim=-1)
        q = self.query(q).view(-1, self.heads, self.nope + self.rope)
        latents[batch.cache_rows] = torch.cat([self.kv_norm(c), k_shared], dim=-1)

        n, mla = batch.num_decodes, self.kernels.mla
        outputs = []
        if n:
            rows, lengths = batch.decode_rows, batch.decode_lens
            outputs.append(mla.decode(q[:n], self.kv_b, latents, rows, lengths, self.scale))
        for q_i, rows in zip(q[n:].split(batch.prefill_lens), batch.prefill_rows, strict=True):
            outputs.append(mla.prefill(q_i, self.kv_b, latents, rows, self.scale))
        out = (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).flatten(1)
        return self.kernels.linear(self.gate(out, gate), self.o_proj.weight)


def _sigmoid_gate(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """K3's output gate, element by element before the output projection."""
    return (x.float() * torch.sigmoid(logits.float())).to(x.dtype)


def _no_gate(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Kimi-Linear has none; ``logits`` is empty."""
    return x
