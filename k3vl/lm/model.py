"""The Kimi K3 language model: embedding, hybrid layers, head.

Reads like the paper: every layer is an attention (KDA or gated MLA) and an MLP (dense or latent
MoE), joined by attention residuals. Positions are nowhere; the KDA state carries the order.
Source: Kimi K3 ``modeling_kimi_linear.py``; Kimi K3 report, sections 2.1 to 2.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from k3vl.kernels.situ import SiluGLU, SituGLU
from k3vl.lm.kda import KimiDeltaAttention
from k3vl.lm.layers import GatedMLP
from k3vl.lm.mla import MultiHeadLatentAttention
from k3vl.lm.moe import LatentMoE
from k3vl.lm.residual import AttentionResidualStream, PlainStream, ReadWeights, Stream
from k3vl.parameters import linear, parameter

if TYPE_CHECKING:
    from k3vl.config import TextConfig
    from k3vl.kernels.choice import Kernels
    from k3vl.kernels.moe.experts import ExpertForm
    from k3vl.kernels.weight import Storage, Weight
    from k3vl.lm.batch import Batch
    from k3vl.lm.cache import HybridCache, KDAState


@dataclass(frozen=True, slots=True, eq=False)
class HeadWeights:
    """``matrix`` [vocab, D], from hidden states to logits."""

    matrix: Weight


class Layer(nn.Module):
    """Attention and MLP, each reading the stream through its own weights."""

    def __init__(
        self,
        config: TextConfig,
        index: int,
        kernels: Kernels,
        *,
        experts: ExpertForm,
        router: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate uninitialised weights of the layer's own kinds."""
        super().__init__()
        activation = (
            SituGLU(
                beta=config.activation_situ_beta,
                linear_beta=config.activation_situ_linear_beta,
            )
            if config.hidden_act == "situ"
            else SiluGLU()
        )
        kind = KimiDeltaAttention if config.is_kda(index) else MultiHeadLatentAttention
        self.index = index
        self.attn_read = ReadWeights(config, kernels, dtype=dtype, device=device)
        self.attn: KimiDeltaAttention | MultiHeadLatentAttention = kind(
            config, kernels, dtype=dtype, device=device
        )
        self.mlp_read = ReadWeights(config, kernels, dtype=dtype, device=device)
        self.mlp: LatentMoE | GatedMLP = (
            LatentMoE(
                config, activation, kernels, form=experts, router=router, dtype=dtype, device=device
            )
            if config.is_moe(index)
            else GatedMLP(
                config.hidden_size,
                config.intermediate_size,
                activation,
                kernels,
                dtype=dtype,
                device=device,
            )
        )

    def forward(self, stream: Stream, batch: Batch, state: KDAState | torch.Tensor) -> None:
        """Advance the stream; ``state`` is this layer's part of the cache."""
        x = stream.read(self.attn_read)
        stream.begin_layer(self.index)
        stream.add(self.attn(x, batch, state, stream.sum))
        x = stream.read(self.mlp_read)
        stream.add(self.mlp(x, stream.sum))


class K3Model(nn.Module):
    """The whole language model; parameters are filled by ``k3vl.lm.weights``."""

    def __init__(
        self,
        config: TextConfig,
        kernels: Kernels,
        *,
        experts: ExpertForm = "float",
        router: torch.dtype = torch.float32,
        head_rows: int | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate uninitialised weights.

        Args:
            config: geometry.
            kernels: what runs it.
            head_rows: of the head's matrix, where other ranks have more; None: the vocabulary.
            experts: form of the routed experts' weights; one that ``kernels`` can run.
            router: dtype of the routers' weights, float32 or ``dtype``.
            dtype, device: of all other weights.
        """
        super().__init__()
        self.config, self.kernels, self.experts = config, kernels, experts
        self.embedding = parameter(
            config.vocab_size, config.hidden_size, dtype=dtype, device=device
        )
        self.layers = nn.ModuleList(
            Layer(config, i, kernels, experts=experts, router=router, dtype=dtype, device=device)
            for i in range(config.num_hidden_layers)
        )
        self.final_read = ReadWeights(config, kernels, dtype=dtype, device=device)
        self.head = linear(config.hidden_size, head_rows or config.vocab_size, dtype, device)
        self.weights = HeadWeights(self.head.weight)
        self.stream: type[AttentionResidualStream | PlainStream] = (
            AttentionResidualStream if config.attn_res_block_size else PlainStream
        )

    def bind(self, storage: Storage) -> None:
        """Let every layer gather its weights anew; ``storage`` tells how matrices lie in memory.

        Filling a parameter in place needs nothing of the kind.
        """
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.attn.bind(storage)
            layer.mlp.bind(storage)
        self.weights = HeadWeights(storage.matrix(self.head.weight))

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: HybridCache) -> torch.Tensor:
        """Run one step.

        Returns:
            [R, vocab] float32 logits of ``batch.logit_rows``.
        """
        stream = self.stream(len(batch.token_ids), self.embedding, self.config)
        torch.index_select(self.embedding, 0, batch.token_ids, out=stream.first)
        if batch.features is not None and batch.feature_rows is not None:
            features = batch.features.to(stream.first.dtype)
            stream.first.index_copy_(0, batch.feature_rows, features)
        return self.logits(self.advance(stream, batch, cache), batch.logit_rows)

    def advance(self, stream: Stream, batch: Batch, cache: HybridCache) -> torch.Tensor:
        """Run all layers over a stream whose inputs are there; [N, D], what the head reads."""
        for layer, state in zip(self.layers, cache.layers, strict=True):
            layer(stream, batch, state)
        return stream.read(self.final_read)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """[R, vocab] float32 of some rows of [N, D], or of all."""
        if rows is not None:
            hidden = hidden[rows]
        head = self.kernels.head or self.kernels.linear
        return head(hidden, self.weights.matrix, dtype=torch.float32)
