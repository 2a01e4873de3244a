"""The gated multi-head latent attention layer, without positions.

Source: Kimi K3 ``modeling_kimi_linear.py`` (KimiMLAAttention with ``mla_use_nope``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from k3vl.kernels.mla.layer import MLALayerWeights
from k3vl.kernels.weight import AsAllocated
from k3vl.lm.layers import RMSNorm
from k3vl.parameters import linear, parameter

if TYPE_CHECKING:
    import torch

    from k3vl.config import TextConfig
    from k3vl.kernels.choice import Kernels
    from k3vl.kernels.weight import Storage
    from k3vl.lm.batch import Batch

LOW_RANK_EPS = 1e-6
"""The two low-rank norms are built without an epsilon and get their class's own, not config's."""


class LowRankQuery(nn.Module):
    """Norm and expansion of the query's low rank."""

    def __init__(self, rank: int, width: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate uninitialised weights."""
        super().__init__()
        self.norm = RMSNorm(rank, LOW_RANK_EPS, dtype=dtype, device=device)
        self.expand = linear(rank, width, dtype, device)


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
        # Without a rank ``in_proj`` makes queries.
        self.query = LowRankQuery(rank, query, dtype=dtype, device=device) if rank else None
        self.kv_norm = RMSNorm(self.latent, LOW_RANK_EPS, dtype=dtype, device=device)
        # [H, nope + V, R]: every head's key rows, then its value rows, as in the checkpoint.
        self.kv_b = parameter(
            self.heads, self.nope + self.value, self.latent, dtype=dtype, device=device
        )
        self.o_proj = linear(width, d, dtype, device)
        self.bind(AsAllocated())

    def bind(self, storage: Storage) -> None:
        """Gather what the op reads; ``storage`` tells how matrices lie in memory."""
        self.weights = MLALayerWeights(
            splits=self.splits,
            in_proj=storage.matrix(self.in_proj.weight),
            q_norm=None if self.query is None else self.query.norm.weight,
            q_b=None if self.query is None else storage.matrix(self.query.expand.weight),
            kv_norm=self.kv_norm.weight,
            kv_b=self.kv_b,
            o_proj=storage.matrix(self.o_proj.weight),
            scale=self.scale,
            eps=self.kv_norm.eps,
        )

    def forward(
        self,
        x: torch.Tensor,
        batch: Batch,
        latents: torch.Tensor,
        onto: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[N, D] -> [N, D], added to ``onto`` if there is one.

        Writes the new tokens' rows of ``latents`` [S, R + P].
        """
        return self.kernels.mla(x, self.weights, latents, batch, onto=onto)
