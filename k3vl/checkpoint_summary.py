"""What a checkpoint directory adds up to: layers, parameters, bytes, gaps, memory.

Here: arithmetic over headers, or over the expected table where only the configuration is there. Not
here: the table itself (``k3vl.lm.table``, ``k3vl.vision.weights``; the caller joins them), reading
data, printing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3vl.checkpoint import CheckpointReader, has_weights, logical_tensors

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    import torch

    from k3vl.checkpoint import LogicalTensor, TensorSpec
    from k3vl.config import K3Config, TextConfig

PARTS = (
    "embedding",
    "KDA",
    "MLA",
    "dense MLP",
    "experts",
    "shared experts",
    "router and latent",
    "norms and residuals",
    "head",
    "vision tower",
    "projector",
    "other",
)
"""Every tensor is counted in exactly one of these."""


@dataclass(frozen=True, slots=True)
class PartSummary:
    """One part's share.

    Attributes:
        tensors: as stored; a packed weight and its scales are two.
        parameters: after decoding; scales are not parameters.
        nbytes: on disk.
    """

    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """A checkpoint in numbers.

    Attributes:
        directory: where it lies.
        weights_present: False: there is a configuration only, and the numbers are what it implies.
        layers: kind of every layer in order, e.g. ``KDA + MoE``.
        parts: only those that exist, in the order of :data:`PARTS`.
        encodings: shares by encoding: a dtype's name, ``int8`` or ``mxfp4``; largest first.
        missing: logical names that the configuration asks for and the weights lack.
        left_over: logical names that no part of the model takes.
        wrong_shape: one sentence for every tensor that has another shape than expected.
    """

    directory: str
    weights_present: bool
    layers: tuple[str, ...]
    parts: Mapping[str, PartSummary]
    encodings: Mapping[str, PartSummary]
    missing: tuple[str, ...]
    left_over: tuple[str, ...]
    wrong_shape: tuple[str, ...]

    @property
    def tensors(self) -> int:
        """Stored tensors of all parts."""
        return sum(part.tensors for part in self.parts.values())

    @property
    def parameters(self) -> int:
        """Parameters of all parts."""
        return sum(part.parameters for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        """Bytes on disk of all parts."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def complete(self) -> bool:
        """Whether the weights are there and are exactly what the configuration asks for."""
        return self.weights_present and not (self.missing or self.left_over or self.wrong_shape)

    def bytes_in_memory(
        self, dtype: torch.dtype | None = None, *, kept: Collection[str] = ()
    ) -> int:
        """What the weights take; see :meth:`fits`."""
        if dtype is None:
            return self.nbytes
        packed = [self.encodings[name] for name in self.encodings if name in kept]
        decoded = self.parameters - sum(share.parameters for share in packed)
        return decoded * dtype.itemsize + sum(share.nbytes for share in packed)

    def fits(
        self,
        available_bytes: int,
        dtype: torch.dtype | None = None,
        *,
        kept: Collection[str] = (),
    ) -> tuple[bool, str]:
        """Compare the weights, and nothing but them, with an amount of memory.

        Args:
            available_bytes: what there is.
            dtype: that every weight is decoded to; None keeps the stored form.
            kept: encodings that are not decoded all the same.

        Returns:
            Whether they fit, and a sentence with the numbers.
        """
        form = "as stored" if dtype is None else f"as {str(dtype).removeprefix('torch.')}"
        packed = [name for name in self.encodings if dtype is not None and name in kept]
        form = " and ".join((form, *packed))
        needed = self.bytes_in_memory(dtype, kept=kept)
        fits = needed <= available_bytes
        apart = available_bytes - needed if fits else needed - available_bytes
        sentence = (
            f"{self.parameters:,} parameters {form} take {_gib(needed)}, {_gib(available_bytes)} "
            f"are available: {_gib(apart)} {'to spare' if fits else 'short'}"
        )
        if not fits and (experts := self.parts.get("experts")):
            decoded = None if dtype is None or "mxfp4" in packed else dtype
            size = experts.parameters * decoded.itemsize if decoded else experts.nbytes
            sentence += f" ({_gib(size)} of it are routed experts)"
        return fits, sentence


def summarise_checkpoint(
    directory: Path, config: K3Config, expected: Mapping[str, TensorSpec]
) -> CheckpointSummary:
    """Add up a checkpoint without reading its data.

    Args:
        directory: with or without weights.
        config: of that directory.
        expected: stored tensors that the configuration implies, text and vision together.

    Raises:
        WeightError: the index or a header cannot be read, or an encoding does not fit together.
    """
    present = has_weights(directory)
    specs = CheckpointReader(directory).specs() if present else expected
    found = logical_tensors(specs)
    wanted = logical_tensors(expected) if present else found
    heads = config.text.linear_attn_config.num_heads
    return CheckpointSummary(
        directory=str(directory),
        weights_present=present,
        layers=tuple(_kind(config.text, layer) for layer in range(config.text.num_hidden_layers)),
        parts=_parts(found, config.text),
        encodings=_encodings(found, specs),
        missing=tuple(sorted(wanted.keys() - found.keys())),
        left_over=tuple(sorted(found.keys() - wanted.keys())),
        wrong_shape=tuple(
            f"{name} is {list(tensor.shape)}, expected {list(wanted[name].shape)}"
            for name, tensor in found.items()
            if name in wanted and not _shape_fits(name, tensor, wanted[name], heads)
        ),
    )


def part_of(name: str, config: TextConfig) -> str:
    """Tell which of :data:`PARTS` a logical tensor belongs to, by its name."""
    if name.startswith("vision_tower."):
        return "vision tower"
    if name.startswith("mm_projector."):
        return "projector"
    path = name.removeprefix("language_model.")
    if path == name:
        return "other"
    whole = {"lm_head.weight": "head", "model.embed_tokens.weight": "embedding"}
    if path in whole:
        return whole[path]
    fields = path.split(".")
    if fields[:2] != ["model", "layers"] or len(fields) < 4 or not fields[2].isdecimal():
        return "norms and residuals" if fields[0] == "model" else "other"
    return _part_of_layer(fields[3:], int(fields[2]), config)


def _part_of_layer(fields: list[str], layer: int, config: TextConfig) -> str:
    match fields:
        case ["self_attn", *_]:
            return "KDA" if config.is_kda(layer) else "MLA"
        case ["mlp", *_]:
            return "dense MLP"
        case ["block_sparse_moe", "experts", *_]:
            return "experts"
        case ["block_sparse_moe", "shared_experts", *_]:
            return "shared experts"
        case ["block_sparse_moe", *_]:
            return "router and latent"
        case _:
            return "norms and residuals"


def _kind(config: TextConfig, layer: int) -> str:
    attention = "KDA" if config.is_kda(layer) else "MLA"
    return f"{attention} + {'MoE' if config.is_moe(layer) else 'dense'}"


def _parts(found: Mapping[str, LogicalTensor], config: TextConfig) -> dict[str, PartSummary]:
    counts = {part: [0, 0, 0] for part in PARTS}
    for name, tensor in found.items():
        _count(counts[part_of(name, config)], tensor)
    return {part: PartSummary(*count) for part, count in counts.items() if count[0]}


def _encodings(
    found: Mapping[str, LogicalTensor], specs: Mapping[str, TensorSpec]
) -> dict[str, PartSummary]:
    counts: dict[str, list[int]] = {}
    for tensor in found.values():
        encoding: str = tensor.encoding
        if encoding == "plain":
            encoding = str(specs[tensor.main].dtype).removeprefix("torch.")
        _count(counts.setdefault(encoding, [0, 0, 0]), tensor)
    shares = {encoding: PartSummary(*count) for encoding, count in counts.items()}
    return dict(sorted(shares.items(), key=_by_size))


def _count(count: list[int], tensor: LogicalTensor) -> None:
    """Add a tensor to tensors, parameters and bytes."""
    count[0] += 1 if tensor.scale is None else 2
    count[1] += tensor.numel
    count[2] += tensor.nbytes


def _by_size(entry: tuple[str, PartSummary]) -> int:
    return -entry[1].nbytes


def _shape_fits(name: str, found: LogicalTensor, wanted: LogicalTensor, heads: int) -> bool:
    # One value per head counts, whatever length is stored; the loader takes the leading ones.
    if name.endswith(".A_log"):
        return found.numel >= heads
    return found.shape == wanted.shape


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.2f} GiB"
