"""The Kimi Delta Attention layer.

Projections, short convolutions, decay and write strength, the delta rule, gated output norm.
Source: Kimi K3 ``modeling_kimi_linear.py`` (KimiDeltaAttention); Kimi Linear report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from k3vl.kernels.kda import KDAWeights
from k3vl.kernels.kda.layer import KDALayerWeights
from k3vl.kernels.weight import AsAllocated
from k3vl.parameters import linear, parameter

if TYPE_CHECKING:
    import torch

    from k3vl.config import TextConfig
    from k3vl.kernels.choice import Kernels
    from k3vl.kernels.weight import Storage
    from k3vl.lm.batch import Batch
    from k3vl.lm.cache import KDAState


class KimiDeltaAttention(nn.Module):
    """One KDA layer; weights keep K3's meaning, projections of one input are one matrix.

    ``in_proj`` rows: q, k, v (H K each), output gate, decay rank, write logits (H). The output
    gate is full rank in K3 (H K rows); in Kimi-Linear it is a rank that ``gate_b`` expands.
    """

    def __init__(
        self, config: TextConfig, kernels: Kernels, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate uninitialised weights."""
        super().__init__()
        cfg = config.linear_attn_config
        self.kernels = kernels
        self.heads, self.head = cfg.num_heads, cfg.head_dim
        width, rank, d = self.heads * self.head, self.head, config.hidden_size
        gate = width if cfg.use_full_rank_gate else rank
        self.splits = (3 * width, gate, rank, self.heads)
        self.in_proj = linear(d, sum(self.splits), dtype, device)
        self.decay_b = linear(rank, width, dtype, device)
        self.gate_b = None if cfg.use_full_rank_gate else linear(rank, width, dtype, device)
        self.o_proj = linear(width, d, dtype, device)
        self.conv = parameter(3 * width, cfg.short_conv_kernel_size, device=device)
        self.a_log = parameter(self.heads, device=device)
        self.dt_bias = parameter(width, device=device)
        self.o_norm = parameter(self.head, device=device)
        self.eps, self.lower_bound = config.rms_norm_eps, cfg.gate_lower_bound
        self.bind(AsAllocated())

    def bind(self, storage: Storage) -> None:
        """Gather what the op reads; ``storage`` tells how matrices lie in memory."""
        self.weights = KDALayerWeights(
            splits=self.splits,
            in_proj=storage.matrix(self.in_proj.weight),
            gate_b=None if self.gate_b is None else storage.matrix(self.gate_b.weight),
            decay_b=storage.matrix(self.decay_b.weight),
            o_proj=storage.matrix(self.o_proj.weight),
            core=KDAWeights(
                conv=self.conv,
                a_log=self.a_log,
                dt_bias=self.dt_bias,
                o_norm=self.o_norm,
                eps=self.eps,
                lower_bound=self.lower_bound,
            ),
        )

    def forward(
        self, x: torch.Tensor, batch: Batch, state: KDAState, onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[N, D] -> [N, D], added to ``onto`` if there is one; advances ``state`` in place."""
        cells = batch.cells[state.index]  # [B, H]
        return self.kernels.kda(
            x, self.weights, state.windows, state.states, cells, batch, onto=onto
        )
