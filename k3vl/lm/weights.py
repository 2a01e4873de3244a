"""Checkpoint names of the language model -> parameters, strictly.

One table, in the order of the layers. Projections that share an input are rows of one matrix here
and separate tensors in the checkpoint; a target is then a view of its rows.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from k3vl.checkpoint import Placement, StoredPlacement, logical_tensors
from k3vl.kernels.int8 import COLUMNS
from k3vl.kernels.moe.mxfp4 import Mxfp4Experts, Part
from k3vl.kernels.weight import KeptCodes
from k3vl.lm.kda import KimiDeltaAttention
from k3vl.lm.model import Layer
from k3vl.lm.moe import LatentMoE
from k3vl.lm.ranks import allocate, axis_of
from k3vl.lm.table import expected_tensors
from k3vl.parameters import Share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k3vl.checkpoint import CheckpointReader
    from k3vl.config import TextConfig
    from k3vl.kernels.choice import Kernels
    from k3vl.kernels.moe.experts import ExpertForm
    from k3vl.lm.layers import GatedMLP
    from k3vl.lm.mla import MultiHeadLatentAttention
    from k3vl.lm.model import K3Model
    from k3vl.lm.ranks import Ranks
    from k3vl.lm.residual import ReadWeights

PREFIX = "language_model."


@torch.no_grad()
def load_model(
    reader: CheckpointReader,
    config: TextConfig,
    kernels: Kernels,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks | None = None,
) -> K3Model:
    """Build the language model, or a rank's part of it, and fill it from a checkpoint.

    Routed experts that are stored in 4 bits stay so where the kernels can run them: packed bytes go
    from the mapped file, matrix by matrix, to their place on the device. What is stored in 8 bits
    stays so where the kernels read it.

    Raises:
        ConfigError: the ranks cannot divide it.
        WeightError: a tensor is missing, left over, damaged or of the wrong shape.
    """
    form = expert_form(reader, config, kernels)
    router = router_dtype(reader, dtype)
    model = allocate(config, kernels, ranks, form=form, router=router, dtype=dtype, device=device)
    # K3 stores one A_log per channel of a head, of which one per head counts.
    products = [_ResidualQuery(read, path) for read, path in _reads(model)]
    kept = KeptCodes()
    coded = _coded(reader) if kernels.keeps_codes else frozenset()
    placements: dict[str, Placement | StoredPlacement] = {
        PREFIX + name: StoredPlacement(tuple(target.shape), "int8", kept.taker(target))
        if PREFIX + name in coded
        else Placement(target, leading=name.endswith(".A_log"), share=_share(name, ranks))
        for name, target in _targets(model)
    }
    for packed in _packed(model):
        take = partial(packed.experts.put, packed.expert, packed.part)
        share = _share(packed.name, ranks)
        placements[PREFIX + packed.name] = StoredPlacement(packed.shape, "mxfp4", take, share)
    for product in products:
        placements |= {PREFIX + n: Placement(t) for n, t in product.parts.items()}
    reader.load_into(placements, prefixes=[PREFIX])
    for product in products:
        product.finish()
    model.bind(kept)
    return model


def _share(name: str, ranks: Ranks | None) -> Share | None:
    """What a rank takes of a tensor."""
    axis = None if ranks is None else axis_of(name)
    return None if ranks is None or axis is None else Share(axis, ranks.rank, ranks.size)


def expert_form(reader: CheckpointReader, config: TextConfig, kernels: Kernels) -> ExpertForm:
    """In which form a checkpoint's routed experts are kept: packed if all are, and can be run."""
    if kernels.latent_moe_mxfp4 is None:
        return "float"
    moe_layers = sum(config.is_moe(layer) for layer in range(config.num_hidden_layers))
    packed = [
        name
        for name in reader.shards
        if ".block_sparse_moe.experts." in name and name.endswith(".weight_packed")
    ]
    return "mxfp4" if len(packed) == 3 * config.num_experts * moe_layers > 0 else "float"


def router_dtype(reader: CheckpointReader, dtype: torch.dtype) -> torch.dtype:
    """The model's dtype where routers are stored in it, float32 else: nothing is rounded."""
    stored = {spec.dtype for n, spec in reader.specs().items() if n.endswith(ROUTER)}
    return dtype if stored == {dtype} else torch.float32


ROUTER = ".block_sparse_moe.gate.weight"

_MULTIPLIED = ("proj.weight", "lm_head.weight", "w1.weight", "w2.weight", "w3.weight")
"""How the names of matrices end that nothing but a product reads, ``kv_b_proj`` apart."""


def _coded(reader: CheckpointReader) -> frozenset[str]:
    """Matrices that products can read in the 8 bits that they are stored in."""
    specs = {n: spec for n, spec in reader.specs().items() if n.startswith(PREFIX)}
    return frozenset(
        name
        for name, tensor in logical_tensors(specs).items()
        if tensor.encoding == "int8"
        and tensor.scale is not None
        and name.endswith(_MULTIPLIED)
        and not name.endswith(".kv_b_proj.weight")
        and not tensor.shape[1] // specs[tensor.scale].shape[1] % COLUMNS
    )


def stored_tensors(model: K3Model) -> dict[str, torch.Tensor]:
    """The way back: checkpoint name -> tensor, such that :func:`load_model` gives the same model.

    None of its weights is kept in 8 bits. Tensors are views of its own where they can be. Of a
    mixture only the product of norm and projection is known; it is written as the norm, with a
    projection of ones.
    """
    specs = expected_tensors(model.config, quantized_experts=model.experts == "mxfp4")
    tensors: dict[str, torch.Tensor] = {}
    for name, target in _targets(model):
        shape = specs[PREFIX + name].shape
        stored = target.detach()
        if name.endswith(".A_log") and stored.numel() < math.prod(shape):
            stored = torch.cat([stored, stored.new_zeros(math.prod(shape) - stored.numel())])
        tensors[PREFIX + name] = stored.reshape(shape)
    for packed in _packed(model):
        values, scale = packed.experts.taken(packed.expert, packed.part)
        tensors |= {f"{PREFIX}{packed.name}_packed": values, f"{PREFIX}{packed.name}_scale": scale}
    for read, path in _reads(model):
        if read.query is not None:
            tensors[f"{PREFIX}{path}_norm.weight"] = read.query.detach()
            tensors[f"{PREFIX}{path}_proj.weight"] = torch.ones_like(read.query).unsqueeze(0)
    return tensors


class _ResidualQuery:
    """``*_res_norm.weight`` and ``*_res_proj.weight``, of which only the product is kept."""

    def __init__(self, read: ReadWeights, path: str) -> None:
        self.query = read.query
        self.parts: dict[str, torch.Tensor] = {}
        if read.query is not None:
            self.norm = torch.empty_like(read.query)
            self.proj = torch.empty_like(read.query).unsqueeze(0)
            self.parts = {f"{path}_norm.weight": self.norm, f"{path}_proj.weight": self.proj}

    def finish(self) -> None:
        if self.query is not None:
            self.query.copy_(self.norm * self.proj[0])


def _layers(model: K3Model) -> list[Layer]:
    return [layer for layer in model.layers if isinstance(layer, Layer)]


def _reads(model: K3Model) -> Iterator[tuple[ReadWeights, str]]:
    """Every read of the stream and where its mixture lies in the checkpoint."""
    for i, layer in enumerate(_layers(model)):
        yield layer.attn_read, f"model.layers.{i}.self_attention_res"
        yield layer.mlp_read, f"model.layers.{i}.mlp_res"
    yield model.final_read, "model.output_attn_res"


def _targets(model: K3Model) -> Iterator[tuple[str, torch.Tensor]]:
    """All other tensors that are decoded."""
    yield "model.embed_tokens.weight", model.embedding
    for i, layer in enumerate(_layers(model)):
        path = f"model.layers.{i}"
        yield f"{path}.input_layernorm.weight", layer.attn_read.norm
        yield f"{path}.post_attention_layernorm.weight", layer.mlp_read.norm
        if isinstance(layer.attn, KimiDeltaAttention):
            yield from _kda(layer.attn, f"{path}.self_attn")
        else:
            yield from _mla(layer.attn, f"{path}.self_attn")
        if isinstance(layer.mlp, LatentMoE):
            yield from _moe(layer.mlp, f"{path}.block_sparse_moe")
        else:
            yield from _gated_mlp(layer.mlp, f"{path}.mlp")
    yield "model.norm.weight", model.final_read.norm
    yield "lm_head.weight", model.head.weight


def _kda(layer: KimiDeltaAttention, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    width = layer.heads * layer.head
    full_rank = layer.gate_b is None
    _, gate, rank, heads = layer.splits
    rows = layer.in_proj.weight.split([width, width, width, gate, rank, heads])
    names = ("q_proj", "k_proj", "v_proj", "g_proj" if full_rank else "g_a_proj", "f_a_proj")
    for name, view in zip((*names, "b_proj"), rows, strict=True):
        yield f"{path}.{name}.weight", view
    yield f"{path}.f_b_proj.weight", layer.decay_b.weight
    if layer.gate_b is not None:
        yield f"{path}.g_b_proj.weight", layer.gate_b.weight
    for name, view in zip("qkv", layer.conv.unsqueeze(1).split(width), strict=True):
        yield f"{path}.{name}_conv1d.weight", view
    yield f"{path}.A_log", layer.a_log
    yield f"{path}.dt_bias", layer.dt_bias
    yield f"{path}.o_norm.weight", layer.o_norm
    yield f"{path}.o_proj.weight", layer.o_proj.weight


def _mla(layer: MultiHeadLatentAttention, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    query, latent, shared, gate = layer.splits
    q_rows, kv_rows, gate_rows = layer.in_proj.weight.split([query, latent + shared, gate])
    if layer.query is not None:
        yield f"{path}.q_a_proj.weight", q_rows
        yield f"{path}.q_a_layernorm.weight", layer.query.norm.weight
        yield f"{path}.q_b_proj.weight", layer.query.expand.weight
    else:
        yield f"{path}.q_proj.weight", q_rows
    yield f"{path}.kv_a_proj_with_mqa.weight", kv_rows
    yield f"{path}.kv_a_layernorm.weight", layer.kv_norm.weight
    yield f"{path}.kv_b_proj.weight", layer.kv_b.flatten(0, 1)
    if gate:
        yield f"{path}.g_proj.weight", gate_rows
    yield f"{path}.o_proj.weight", layer.o_proj.weight


def _moe(layer: LatentMoE, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    yield f"{path}.gate.weight", layer.router
    yield f"{path}.gate.e_score_correction_bias", layer.router_bias
    if layer.latent_down is not None:
        yield f"{path}.routed_expert_down_proj.weight", layer.latent_down.weight
    if layer.latent_up is not None:
        yield f"{path}.routed_expert_up_proj.weight", layer.latent_up.weight
    if layer.latent_norm is not None:
        yield f"{path}.routed_expert_norm.weight", layer.latent_norm.weight
    if not isinstance(layer.experts, Mxfp4Experts):
        for e, (w13, w2) in enumerate(zip(layer.experts.w13, layer.experts.w2, strict=True)):
            gate, up = w13.chunk(2)
            yield f"{path}.experts.{e}.w1.weight", gate
            yield f"{path}.experts.{e}.w3.weight", up
            yield f"{path}.experts.{e}.w2.weight", w2
    yield from _gated_mlp(layer.shared, f"{path}.shared_experts")


class _PackedMatrix(NamedTuple):
    """One matrix of one expert that stays packed: its name, and where it goes."""

    name: str
    shape: tuple[int, int]
    experts: Mxfp4Experts
    expert: int
    part: Part


def _packed(model: K3Model) -> Iterator[_PackedMatrix]:
    """All matrices that stay packed."""
    for i, layer in enumerate(_layers(model)):
        if not isinstance(layer.mlp, LatentMoE) or model.experts != "mxfp4":
            continue
        stored = layer.mlp.experts
        assert isinstance(stored, Mxfp4Experts)
        into, back = (stored.inner, stored.latent), (stored.latent, stored.inner)
        parts: tuple[tuple[str, tuple[int, int], Part], ...] = (
            ("w1", into, "gate"),
            ("w3", into, "up"),
            ("w2", back, "down"),
        )
        for e in range(stored.count):
            for name, shape, part in parts:
                path = f"model.layers.{i}.block_sparse_moe.experts.{e}.{name}.weight"
                yield _PackedMatrix(path, shape, stored, e, part)


def _gated_mlp(layer: GatedMLP, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    gate, up = layer.gate_up.weight.chunk(2)
    yield f"{path}.gate_proj.weight", gate
    yield f"{path}.up_proj.weight", up
    yield f"{path}.down_proj.weight", layer.down.weight
