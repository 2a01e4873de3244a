"""Between the training model's fused parameters and K3's tensor names.

The training model (``train_model``) keeps matrices that read the same input in one parameter; a
checkpoint holds them apart, under the names of the released Kimi K3. One table says which part of
which parameter a tensor is; both directions follow from it. Reading and writing files is
``k3vl.checkpoint``'s work, not done here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from k3vl.demo.geometry import DEMO, Geometry
from k3vl.errors import WeightError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

TEXT, TOWER = "language_model.model", "vision_tower"


@dataclass(frozen=True, slots=True)
class Entry:
    """One K3 tensor and where it lies in the training model.

    Attributes:
        name: K3's tensor name.
        parameter: name of the training model's parameter.
        part: index into that parameter; ``()`` is all of it.
        shape: K3's shape of the tensor.
        live: how many leading elements mean something, where the tensor is stored longer.
    """

    name: str
    parameter: str
    part: tuple[int | slice, ...]
    shape: tuple[int, ...]
    live: int | None = None


def entries(g: Geometry = DEMO) -> Iterator[Entry]:
    """The whole table, in checkpoint order."""
    d = g.width
    yield Entry(f"{TEXT}.embed_tokens.weight", "embed", (), (g.vocab, d))
    for layer in range(g.layers):
        k3, own = f"{TEXT}.layers.{layer}", f"layers.{layer}"
        yield Entry(f"{k3}.input_layernorm.weight", f"{own}.n1", (), (d,))
        yield Entry(f"{k3}.post_attention_layernorm.weight", f"{own}.n2", (), (d,))
        yield Entry(f"{k3}.self_attention_res_norm.weight", f"{own}.rn1", (), (d,))
        yield Entry(f"{k3}.self_attention_res_proj.weight", f"{own}.rw1", (), (1, d))
        yield Entry(f"{k3}.mlp_res_norm.weight", f"{own}.rn2", (), (d,))
        yield Entry(f"{k3}.mlp_res_proj.weight", f"{own}.rw2", (), (1, d))
        attention = _mla if g.is_mla(layer) else _kda
        yield from attention(g, f"{k3}.self_attn", f"{own}.attn")
        if layer == 0:
            yield from _glu(f"{k3}.mlp", f"{own}.mlp.gu", f"{own}.mlp.down", d, g.dense)
        else:
            yield from _moe(g, f"{k3}.block_sparse_moe", f"{own}.mlp")
    yield Entry(f"{TEXT}.norm.weight", "norm", (), (d,))
    yield Entry(f"{TEXT}.output_attn_res_norm.weight", "rn", (), (d,))
    yield Entry(f"{TEXT}.output_attn_res_proj.weight", "rw", (), (1, d))
    yield Entry("language_model.lm_head.weight", "head", (), (g.vocab, d))
    yield from _vision(g)


def _kda(g: Geometry, k3: str, own: str) -> Iterator[Entry]:
    d, p = g.width, g.attention_width
    for i, letter in enumerate("qkvg"):
        yield Entry(f"{k3}.{letter}_proj.weight", f"{own}.qkvg", (i,), (p, d))
    for i, letter in enumerate("qkv"):
        rows = slice(i * p, (i + 1) * p)
        yield Entry(f"{k3}.{letter}_conv1d.weight", f"{own}.conv", (rows,), (p, 1, g.conv))
    # The low-rank decay gate is head_dim wide and A_log is stored at that length, as in K3.
    yield Entry(f"{k3}.f_a_proj.weight", f"{own}.fa", (), (g.head_dim, d))
    yield Entry(f"{k3}.f_b_proj.weight", f"{own}.fb", (), (p, g.head_dim))
    yield Entry(f"{k3}.b_proj.weight", f"{own}.b", (), (g.heads, d))
    yield Entry(f"{k3}.A_log", f"{own}.A_log", (), (g.head_dim,), live=g.heads)
    yield Entry(f"{k3}.dt_bias", f"{own}.dt_bias", (), (p,))
    yield Entry(f"{k3}.o_norm.weight", f"{own}.onorm", (), (g.head_dim,))
    yield Entry(f"{k3}.o_proj.weight", f"{own}.o", (), (d, p))


def _mla(g: Geometry, k3: str, own: str) -> Iterator[Entry]:
    d, p, h = g.width, g.attention_width, g.heads
    key, both = g.nope + g.rope, g.nope + g.head_dim
    yield Entry(f"{k3}.q_a_proj.weight", f"{own}.qa", (), (g.q_rank, d))
    yield Entry(f"{k3}.q_a_layernorm.weight", f"{own}.qan", (), (g.q_rank,))
    yield Entry(f"{k3}.q_b_proj.weight", f"{own}.qb", (), (h * key, g.q_rank))
    yield Entry(f"{k3}.kv_a_proj_with_mqa.weight", f"{own}.kva", (), (g.kv_rank + g.rope, d))
    yield Entry(f"{k3}.kv_a_layernorm.weight", f"{own}.kvan", (), (g.kv_rank,))
    yield Entry(f"{k3}.kv_b_proj.weight", f"{own}.kvb", (), (h * both, g.kv_rank))
    yield Entry(f"{k3}.g_proj.weight", f"{own}.g", (), (p, d))
    yield Entry(f"{k3}.o_proj.weight", f"{own}.o", (), (d, p))


def _glu(k3: str, gate_up: str, down: str, d: int, inner: int) -> Iterator[Entry]:
    yield Entry(f"{k3}.gate_proj.weight", gate_up, (0,), (inner, d))
    yield Entry(f"{k3}.up_proj.weight", gate_up, (1,), (inner, d))
    yield Entry(f"{k3}.down_proj.weight", down, (), (d, inner))


def _moe(g: Geometry, k3: str, own: str) -> Iterator[Entry]:
    d = g.width
    yield Entry(f"{k3}.gate.weight", f"{own}.router", (), (g.experts, d))
    yield Entry(f"{k3}.gate.e_score_correction_bias", f"{own}.bias", (), (g.experts,))
    yield Entry(f"{k3}.routed_expert_down_proj.weight", f"{own}.down", (), (g.latent, d))
    for e in range(g.experts):
        expert = f"{k3}.experts.{e}"
        yield Entry(f"{expert}.w1.weight", f"{own}.w13", (0, e), (g.inner, g.latent))
        yield Entry(f"{expert}.w3.weight", f"{own}.w13", (1, e), (g.inner, g.latent))
        yield Entry(f"{expert}.w2.weight", f"{own}.w2", (e,), (g.latent, g.inner))
    yield Entry(f"{k3}.routed_expert_norm.weight", f"{own}.norm", (), (g.latent,))
    yield Entry(f"{k3}.routed_expert_up_proj.weight", f"{own}.up", (), (d, g.latent))
    yield from _glu(f"{k3}.shared_experts", f"{own}.sgu", f"{own}.sd", d, g.shared * g.inner)


def _vision(g: Geometry) -> Iterator[Entry]:
    w, merged = g.vision_width, 4 * g.vision_width
    yield Entry(f"{TOWER}.patch_embed.proj.weight", "vision.patch", (), (w, 3, g.patch, g.patch))
    yield Entry(f"{TOWER}.patch_embed.pos_emb.weight", "vision.pos", (), (g.table, g.table, w))
    for block in range(g.vision_layers):
        k3, own = f"{TOWER}.encoder.blocks.{block}", f"vision.blocks.{block}"
        yield Entry(f"{k3}.norm0.weight", f"{own}.n0", (), (w,))
        yield Entry(f"{k3}.norm1.weight", f"{own}.n1", (), (w,))
        yield Entry(f"{k3}.wqkv.weight", f"{own}.qkv", (), (3 * w, w))
        yield Entry(f"{k3}.wo.weight", f"{own}.o", (), (w, w))
        yield Entry(f"{k3}.mlp.fc0.weight", f"{own}.fc0", (), (g.vision_inner, w))
        yield Entry(f"{k3}.mlp.fc1.weight", f"{own}.fc1", (), (w, g.vision_inner))
    yield Entry(f"{TOWER}.encoder.final_layernorm.weight", "vision.norm", (), (w,))
    yield Entry("mm_projector.proj.0.weight", "vision.p0", (), (merged, merged))
    yield Entry("mm_projector.proj.2.weight", "vision.p2", (), (g.width, merged))
    yield Entry("mm_projector.post_norm.weight", "vision.post", (), (g.width,))


def to_k3(parameters: Mapping[str, Tensor], g: Geometry = DEMO) -> dict[str, Tensor]:
    """Training parameters -> K3 tensors, float32.

    Raises:
        WeightError: a parameter is missing, or has no place in the table.
    """
    table = list(entries(g))
    _same_names(set(parameters), {entry.parameter for entry in table}, "training parameter")
    out = {}
    for entry in table:
        value = parameters[entry.parameter][entry.part].detach().float()
        if entry.live is not None:
            value = torch.cat([value, value.new_zeros(entry.shape[0] - entry.live)])
        out[entry.name] = value.reshape(entry.shape).contiguous()
    return out


def from_k3(tensors: Mapping[str, Tensor], g: Geometry = DEMO) -> dict[str, Tensor]:
    """K3 tensors -> training parameters, float32; the inverse of :func:`to_k3`.

    Raises:
        WeightError: a tensor is missing, left over or of another shape.
    """
    table = list(entries(g))
    _same_names(set(tensors), {entry.name for entry in table}, "tensor")
    parts: dict[str, list[tuple[Entry, Tensor]]] = {}
    for entry in table:
        value = tensors[entry.name].float()
        if tuple(value.shape) != entry.shape:
            raise WeightError(f"{entry.name}: shape {tuple(value.shape)}, expected {entry.shape}")
        parts.setdefault(entry.parameter, []).append((entry, value[: entry.live]))
    return {name: _fuse(name, own, g) for name, own in parts.items()}


def _fuse(name: str, parts: list[tuple[Entry, Tensor]], g: Geometry) -> Tensor:
    """Put a parameter together from its tensors, which lie in the table in storage order."""
    values = [value for _, value in parts]
    leaf = name.rpartition(".")[2]
    if leaf == "w13":
        return torch.stack([torch.stack(values[0::2]), torch.stack(values[1::2])])
    if leaf in ("qkvg", "gu", "sgu", "w2"):
        return torch.stack(values)
    if leaf == "conv":
        return torch.cat(values).reshape(-1, g.conv)
    (value,) = values
    if leaf in ("rw1", "rw2", "rw"):
        return value.reshape(-1)
    if leaf == "patch":
        return value.reshape(g.vision_width, -1)
    if leaf == "qkv":
        return value.reshape(3, g.vision_width, g.vision_width)
    return value


def _same_names(got: set[str], expected: set[str], kind: str) -> None:
    if missing := sorted(expected - got):
        raise WeightError(f"{kind} {missing[0]} is missing ({len(missing)} in all)")
    if extra := sorted(got - expected):
        raise WeightError(f"{kind} {extra[0]} is not part of the model ({len(extra)} in all)")
