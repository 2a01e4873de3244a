"""Tensor parallelism: what each of the GPUs of one host holds of a model, and where they add up.

Heads of both attentions and the inner width of all MLPs, routed experts too, are divided, and the
head's rows; routers, latent and low-rank projections, embedding and norms are on every rank. Two
sums a layer: [D] after attention, and [L + D] after the experts, before their norm (a dense MLP:
[D]). Logits are gathered, so all ranks have the same bits of them and choose the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from k3vl.errors import ConfigError
from k3vl.kernels.choice import reference_kernels
from k3vl.kernels.linear import added
from k3vl.kernels.moe.latent import ComposedLatentMoE, check_shapes
from k3vl.kernels.moe.mxfp4 import in_rows, in_tiles
from k3vl.kernels.mxfp4 import GROUP_SIZE
from k3vl.lm.kda import KimiDeltaAttention
from k3vl.lm.model import K3Model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from k3vl.config import TextConfig
    from k3vl.kernels.choice import Kernels
    from k3vl.kernels.moe.experts import ExpertForm
    from k3vl.kernels.moe.latent import MoEWeights


TIMEOUT = timedelta(minutes=10)
"""Of ranks that wait for each other: one may compile kernels that the others have."""
_all_gather: Callable[[torch.Tensor, torch.Tensor], object] = getattr(
    dist,
    "all_gather_single",
    dist.all_gather_into_tensor,  # as torch called it before 2.13
)


@dataclass(slots=True)
class Ranks:
    """All ranks, as seen from one of them.

    Attributes:
        rank: which one, from 0.
        size: how many.
        kind: ``cuda``: rank r has the r-th, sums are NCCL's; ``cpu``: sums are gloo's.
    """

    rank: int
    size: int
    kind: str = "cpu"

    @property
    def device(self) -> torch.device:
        """This rank's own."""
        return torch.device("cuda", self.rank) if self.kind == "cuda" else torch.device(self.kind)

    def join(self, store: Path) -> None:
        """Meet the others, at a file that all see and nobody has written to."""
        cuda = self.kind == "cuda"
        # Not by the file's URL: torch does not undo its escapes.
        meeting = dist.FileStore(str(store), self.size)  # type: ignore[attr-defined] # documented
        meeting.set_timeout(TIMEOUT)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=meeting,
            rank=self.rank,
            world_size=self.size,
            timeout=TIMEOUT,
            device_id=self.device if cuda else None,
        )

    def abort(self) -> None:
        """End what waits for others on a GPU; by gloo that ends with the others' sockets."""
        if dist.is_initialized() and self.kind == "cuda":
            assert dist.group.WORLD is not None
            dist.group.WORLD.abort()

    def leave(self) -> None:
        """The end; nothing that holds a recorded sum may be left."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``x``, in its place."""
        dist.all_reduce(x)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[N, V / size] of every rank, side by side: [N, V]."""
        rows, width = x.shape
        parts = x.new_empty(self.size * rows, width)
        if rows:  # a pass over the middle of a prompt wants none
            _all_gather(parts, x.contiguous())
        by_rank = parts.view(self.size, rows, width)
        return by_rank.transpose(0, 1).reshape(rows, self.size * width)


# ---------------------------------------------------------------------- ops


@dataclass(frozen=True, slots=True)
class Summed:
    """An op whose results are summands."""

    op: Callable[..., torch.Tensor]
    ranks: Ranks

    def __call__(self, *args: Any, onto: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        """As the op, over all ranks."""
        return added(self.ranks.add(self.op(*args, **kwargs)), onto)


@dataclass(frozen=True, slots=True)
class Gathered:
    """A product whose matrix' rows are divided."""

    op: Callable[..., torch.Tensor]
    ranks: Ranks

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the op, over all ranks."""
        return self.ranks.gather(self.op(*args, **kwargs))


@dataclass(frozen=True, slots=True)
class SplitLatentMoE:
    """The MoE layer over a rank's part of the inner widths; one sum, before the norm."""

    op: ComposedLatentMoE[Any]
    rms_norm: Callable[..., torch.Tensor]
    ranks: Ranks

    def __call__(
        self, x: torch.Tensor, weights: MoEWeights[Any], onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :class:`k3vl.kernels.moe.latent.LatentMoEOp`."""
        w = weights
        check_shapes(x, w)
        latent = self.op.routed(*self.op.front(x, w.router, w.down), replace(w, norm=None))
        both = torch.cat([latent, self.op.gated_mlp(x, w.shared)], -1)
        total, shared = self.ranks.add(both).split([latent.shape[1], x.shape[1]], -1)
        if w.norm is not None:
            total = self.rms_norm(total, w.norm, w.eps)
        return self.op.back(total, w, added(shared, onto))


def split_kernels(kernels: Kernels, ranks: Ranks) -> Kernels:
    """The same ops, of which each ends in a sum over ranks.

    The compiled ones for CPUs run a layer in one piece and have no place for it: plain PyTorch
    takes theirs. Ranks on a CPU are for tests.
    """
    if not isinstance(kernels.latent_moe, ComposedLatentMoE):
        plain = reference_kernels("the compiled ones have no place for sums over ranks")
        kernels = replace(plain, vision=kernels.vision, latent_moe_mxfp4=kernels.latent_moe_mxfp4)

    def split(op: Any) -> Any:
        return None if op is None else SplitLatentMoE(op, kernels.rms_norm, ranks)

    return replace(
        kernels,
        row_independent=False,
        kda=Summed(kernels.kda, ranks),
        mla=Summed(kernels.mla, ranks),
        gated_mlp=Summed(kernels.gated_mlp, ranks),
        latent_moe=split(kernels.latent_moe),
        latent_moe_mxfp4=split(kernels.latent_moe_mxfp4),
        head=Gathered(kernels.linear, ranks),
    )


# ---------------------------------------------------------------------- weights


def part_of(config: TextConfig, size: int, form: ExpertForm = "float") -> TextConfig:
    """What one of so many ranks holds.

    Raises:
        ConfigError: a number of heads or a width cannot be divided among them.
    """
    linear = config.linear_attn_config
    units = {
        "num_attention_heads": (config.num_attention_heads, 1),
        "linear_attn_config.num_heads": (linear.num_heads, 1),
        "intermediate_size": (config.intermediate_size, 1),
        "moe_intermediate_size": (
            config.moe_intermediate_size,
            GROUP_SIZE if form == "mxfp4" else 1,
        ),
        "vocab_size": (config.vocab_size, 1),
    }
    for name, (count, unit) in units.items():
        if count % (size * unit):
            whole = "" if unit == 1 else f" in whole groups of {unit}"
            raise ConfigError(f"{size} ranks: {name} is {count}, which they do not divide{whole}")
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // size,
        linear_attn_config=replace(linear, num_heads=linear.num_heads // size),
        intermediate_size=config.intermediate_size // size,
        moe_intermediate_size=config.moe_intermediate_size // size,
    )


def allocate(
    config: TextConfig,
    kernels: Kernels,
    ranks: Ranks | None,
    *,
    form: ExpertForm,
    router: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
) -> K3Model:
    """A rank's part of a model, or all of it, to be filled.

    Raises:
        ConfigError: see :func:`part_of`.
    """
    own, rows = config, None
    if ranks is not None:
        own, rows = part_of(config, ranks.size, form), config.vocab_size // ranks.size
    model = K3Model(
        own, kernels, experts=form, router=router, head_rows=rows, dtype=dtype, device=device
    )
    return model.eval().requires_grad_(False)


_AXES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "f_b_proj", "g_b_proj"), 0),
    **dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d", "A_log", "dt_bias"), 0),
    **dict.fromkeys(("q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "w1", "w3", "lm_head"), 0),
    **dict.fromkeys(("o_proj", "down_proj", "w2"), 1),
}


def axis_of(name: str) -> int | None:
    """Along which axis ranks divide a checkpoint's tensor into equal parts; None: all have it."""
    return _AXES.get(name.removesuffix(".weight").rpartition(".")[2])


@dataclass(frozen=True, slots=True)
class Cut:
    """A parameter's sections along an axis, of which ranks divide some: (a rank's length, whether).

    Checkpoints hold the sections as tensors of their own; see :func:`axis_of`. ``packed``: experts
    in 4 bits, which lie in tiles and are put together as rows, one after the other, to be cut.
    """

    ranks: Ranks
    axis: int
    sections: tuple[tuple[int, bool], ...]
    packed: bool = False

    @classmethod
    def of(cls, ranks: Ranks, model: K3Model, name: str) -> Cut:
        """Of a parameter or buffer of a rank's model."""
        packed = model.experts == "mxfp4" and name.endswith(_PACKED)
        return cls(ranks, *_sections(model, name), packed=packed)

    def whole_shape(self, shape: torch.Size) -> list[int]:
        """Of what a rank's tensor is a part of."""
        size = self.ranks.size
        total = sum(length * (size if divided else 1) for length, divided in self.sections)
        return [*shape[: self.axis], total, *shape[self.axis + 1 :]]

    def share(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part."""
        if not self.packed:
            return self._cut(whole, self.axis)
        return torch.stack([in_tiles(self._cut(in_rows(one), self.axis - 1)) for one in whole])

    def _cut(self, whole: torch.Tensor, axis: int) -> torch.Tensor:
        size = self.ranks.size
        lengths = [length * (size if divided else 1) for length, divided in self.sections]
        pieces = [
            piece.chunk(size, axis)[self.ranks.rank] if divided else piece
            for piece, (_, divided) in zip(whole.split(lengths, axis), self.sections, strict=True)
        ]
        return torch.cat(pieces, axis)


_PACKED = ("mlp.w13", "mlp.w13_scale", "mlp.w2", "mlp.w2_scale")
_SECTIONS = {
    "attn.conv": (0, 3),  # of q, k and v
    "attn.a_log": (0, 1),
    "attn.dt_bias": (0, 1),
    "attn.decay_b.weight": (0, 1),
    "attn.gate_b.weight": (0, 1),
    "attn.query.expand.weight": (0, 1),
    "attn.kv_b": (0, 1),
    "attn.o_proj.weight": (1, 1),
    "mlp.gate_up.weight": (0, 2),
    "mlp.down.weight": (1, 1),
    "mlp.shared.gate_up.weight": (0, 2),
    "mlp.shared.down.weight": (1, 1),
    "mlp.w2": (2, 1),
    "mlp.w2_scale": (2, 1),
}
"""Axis, and how many equal sections ranks divide."""


def _sections(model: K3Model, name: str) -> tuple[int, tuple[tuple[int, bool], ...]]:
    shape = model.state_dict()[name].shape
    if name == "head.weight":
        return 0, ((shape[0], True),)
    if not name.startswith("layers."):
        return 0, ((shape[0], False),)
    _, index, inside = name.split(".", 2)
    layer: Any = model.layers[int(index)]
    if inside == "attn.in_proj.weight":
        if isinstance(layer.attn, KimiDeltaAttention):
            qkv, gate, rank, write = layer.attn.splits
            full = layer.attn.gate_b is None
            return 0, (*[(qkv // 3, True)] * 3, (gate, full), (rank, False), (write, True))
        query, *kept, gate = layer.attn.splits
        return 0, ((query, layer.attn.query is None), (sum(kept), False), (gate, True))
    if inside in ("mlp.w13", "mlp.w13_scale"):
        count = 16 if model.experts == "mxfp4" else 2  # gates and ups; packed in eight classes
        return 1, ((shape[1] // count, True),) * count
    if inside not in _SECTIONS:
        return 0, ((shape[0], False),)
    axis, count = _SECTIONS[inside]
    return axis, ((shape[axis] // count, True),) * count
