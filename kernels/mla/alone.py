"""An MLA layer on a GPU whose single token has its queries and its cache row made in one launch."""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton

from k3vl.kernels.linear import gpu as linear
from k3vl.kernels.mla import check_store
from k3vl.kernels.mla.alone_kernel import mla_enter_kernel
from k3vl.kernels.mla.layer import ComposedMLALayer
from k3vl.kernels.weight import plain

if TYPE_CHECKING:
    import torch

    from k3vl.kernels.mla.layer import MLALayerWeights
    from k3vl.kernels.sequences import Sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class MLALayerAlone(ComposedMLALayer):
    """The layer as a sequence of ops; between a single token's products there is no launch."""

    def enter(
        self,
        x: torch.Tensor,
        weights: MLALayerWeights,
        latents: torch.Tensor,
        sequences: Sequences,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`ComposedMLALayer.enter`."""
        w = weights
        if w.q_b is None or w.q_norm is None or not _takes(x, plain(w.in_proj), plain(w.q_b)):
            # slots: super() has no class
            return ComposedMLALayer.enter(self, x, w, latents, sequences)
        q, c, shared, gate = self.linear(x, w.in_proj).split(w.splits, dim=-1)
        rows = sequences.cache_rows
        check_store(c, shared, w.kv_norm, latents, rows)
        q_b, (latent, part) = plain(w.q_b), w.splits[1:3]
        shape = linear.row_shape(q_b.shape[1])
        out = x.new_empty(1, q_b.shape[0])
        mla_enter_kernel[(1 + triton.cdiv(q_b.shape[0], shape.rows),)](
            q, w.q_norm, q_b, out, c, shared, w.kv_norm, latents, rows, latents.stride(0), w.eps,
            q_b.shape[0], latent, part, D=q_b.shape[1], BR=triton.next_power_of_2(latent),
            BP=triton.next_power_of_2(max(1, part)),
            **linear.launch_options(shape, x, q_b.shape[1]),
        )  # fmt: skip
        return out.unflatten(-1, (w.kv_b.shape[0], -1)), gate


def _takes(x: torch.Tensor, in_proj: torch.Tensor, q_b: torch.Tensor) -> bool:
    return linear.is_row(x, in_proj) and linear.can_stream(x.dtype, q_b)
