"""Checkpoint directories: safetensors shards to tensors.

Here: the shard index, the stored encodings (plain floats, MXFP4, int8), and strict loading into
tensors that exist already. Not here: writing (``checkpoint_writer.py``), which names a model has
(``vision/weights.py``, ``lm/table.py``), and what they add up to (``checkpoint_summary.py``).

A *logical* name (``X.weight``) is what a model calls a tensor. It is stored under one or two names:

* ``X.weight`` in a floating dtype;
* ``X.weight`` int8 with ``X.weight_scale`` [rows, groups] (compressed-tensors ``int-quantized``,
  symmetric);
* ``X.weight_packed`` and ``X.weight_scale``, both uint8 (``mxfp4-pack-quantized``).

Which one it is follows from the names that are present. ``quantization_config.ignore`` of K3 names
only some of the tensors that are plain, so it is never consulted.
"""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, cast

import torch
from safetensors import SafetensorError, safe_open

from k3vl.errors import WeightError
from k3vl.kernels.int8 import dequantize_int8
from k3vl.kernels.mxfp4 import GROUP_SIZE, NAN_SCALE, dequantize_mxfp4
from k3vl.parameters import Share, whole_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

Encoding: TypeAlias = Literal["plain", "int8", "mxfp4"]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# Rows of a quantised tensor are decoded in pieces of this many values, so that the float32
# intermediates of an embedding table stay small.
_DECODE_VALUES = 1 << 24
_NAMED = 5


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """What a model sees of one or two stored tensors.

    Attributes:
        shape: after decoding.
        encoding: how it is stored.
        main: stored name of the values.
        scale: stored name of the scales; None for plain tensors.
        nbytes: on disk, scales included.
    """

    shape: tuple[int, ...]
    encoding: Encoding
    main: str
    scale: str | None
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of values after decoding."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where a logical tensor goes.

    Attributes:
        target: written in place; its dtype and device decide the result's. A view is fine.
        leading: take the first ``target.numel()`` values of a stored vector that may be longer
            (K3's ``A_log`` holds 128 values of which one per head counts).
        share: the part that goes there, of the leading values too; None: all.
    """

    target: torch.Tensor
    leading: bool = False
    share: Share | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StoredPlacement:
    """Where a quantised tensor goes as it is stored.

    Attributes:
        shape: that it, or its share, must have once decoded.
        encoding: that it must be stored in.
        take: gets values and scales; they are the mapped file, not memory of the process. What it
            cannot use it refuses with a ``WeightError``, which the reader completes by the name.
        share: the part that is taken, whole groups of it; None: all.
    """

    shape: tuple[int, ...]
    encoding: Encoding
    take: Callable[[torch.Tensor, torch.Tensor], None]
    share: Share | None = None


# ---------------------------------------------------------------------- stored and logical names


def logical_name(stored: str, names: Mapping[str, Any]) -> str:
    """Name under which a model knows the stored tensor; ``names`` are all stored ones."""
    if stored.endswith(".weight_packed"):
        return stored.removesuffix("_packed")
    if stored.endswith(".weight_scale"):
        base = stored.removesuffix("_scale")
        if base in names or f"{base}_packed" in names:
            return base
    return stored


def logical_tensors(specs: Mapping[str, TensorSpec]) -> dict[str, LogicalTensor]:
    """Join values and scales, and check that they fit.

    Raises:
        WeightError: a scale is missing, a shape or dtype disagrees, or the encoding is unknown.
    """
    return {
        name: _logical(name, specs)
        for name in dict.fromkeys(logical_name(stored, specs) for stored in specs)
    }


def _logical(name: str, specs: Mapping[str, TensorSpec]) -> LogicalTensor:
    packed = f"{name}_packed"
    main = packed if packed in specs else name
    spec = specs[main]
    if main == name and spec.dtype in _FLOATS:
        return LogicalTensor(spec.shape, "plain", name, None, spec.nbytes)
    if main == packed and name in specs:
        raise WeightError(f"{name} is stored twice: plain and packed")
    wanted = torch.uint8 if main == packed else torch.int8
    if spec.dtype != wanted:
        raise WeightError(f"{main} is {_dtype(spec)}, an encoding that is not known")
    scale_name = f"{name}_scale"
    if (scale := specs.get(scale_name)) is None:
        raise WeightError(f"{main} has no {scale_name}")
    nbytes = spec.nbytes + scale.nbytes
    if main == packed:
        _check_mxfp4(main, spec, scale)
        shape = (*spec.shape[:-1], spec.shape[-1] * 2)
        return LogicalTensor(shape, "mxfp4", main, scale_name, nbytes)
    _check_int8(main, spec, scale)
    return LogicalTensor(spec.shape, "int8", main, scale_name, nbytes)


def _check_mxfp4(name: str, spec: TensorSpec, scale: TensorSpec) -> None:
    columns = spec.shape[-1] * 2 if spec.shape else 0
    expected = (*spec.shape[:-1], columns // GROUP_SIZE)
    fits = columns and not columns % GROUP_SIZE and scale.shape == expected
    if not fits or scale.dtype != torch.uint8:
        raise WeightError(
            f"{name} is {_shown(spec)}, its scale {_shown(scale)}; "
            f"MXFP4 needs one uint8 scale for {GROUP_SIZE} columns"
        )


def _check_int8(name: str, spec: TensorSpec, scale: TensorSpec) -> None:
    rows = spec.shape[0] if len(spec.shape) > 1 else 0
    columns = math.prod(spec.shape[1:])
    groups = scale.shape[1] if len(scale.shape) == 2 and scale.shape[0] == rows else 0
    if not rows or not groups or columns % groups or scale.dtype not in _FLOATS:
        raise WeightError(
            f"{name} is {_shown(spec)}, its scale {_shown(scale)}; int8 needs a floating scale "
            "[rows, groups] with equally wide groups"
        )


# ---------------------------------------------------------------------- reading


class _ShardFile(Protocol):
    """The part of ``safetensors.safe_open`` that is used; its own type says nothing."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> Any: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...


def has_weights(directory: Path) -> bool:
    """Whether there is a shard index or the only file; neither is opened.

    Raises:
        WeightError: there is no such directory, or it cannot be looked into.
    """
    try:
        if not directory.is_dir():
            raise WeightError(f"{directory}: no such directory")
        return any((directory / name).is_file() for name in (INDEX_NAME, SINGLE_NAME))
    except OSError as exc:
        raise WeightError(f"{directory}: cannot be read ({type(exc).__name__})") from exc


class CheckpointReader:
    """The tensors of one checkpoint directory.

    Opening reads the index, or the header of the only file. Data is read shard by shard, and a
    shard is closed before the next one is opened.

    Attributes:
        directory: where it lies.
        shards: stored tensor name -> file name.

    Raises:
        WeightError: there are no weights, or the index or a file cannot be understood.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shards: Mapping[str, str] = self._read_shards()

    def specs(self) -> dict[str, TensorSpec]:
        """Read shape and dtype of every stored tensor from the headers.

        Raises:
            WeightError: a shard is missing or damaged, or it holds other tensors than the index
                says.
        """
        return self._specs(self.shards)

    def load_into(
        self, placements: Mapping[str, Placement | StoredPlacement], *, prefixes: Sequence[str]
    ) -> None:
        """Read every logical tensor whose name starts with one of ``prefixes``, exactly once.

        Args:
            placements: logical name -> where it goes.
            prefixes: the part of the name space that the caller answers for.

        Raises:
            WeightError: a tensor is missing, nobody asked for one, a shape or encoding differs, or
                a file is damaged. Nothing has been written when names, shapes or encodings are at
                fault.
        """
        stray = [name for name in placements if not name.startswith(tuple(prefixes))]
        assert not stray, f"placements outside {prefixes}: {stray[:_NAMED]}"
        mine = {n: s for n, s in self.shards.items() if n.startswith(tuple(prefixes))}
        specs = self._specs(mine)
        tensors = logical_tensors(specs)
        require_same_names(tensors, placements, str(self.directory))
        for name, place in placements.items():
            _check_place(name, tensors[name], place)
        by_shard: dict[str, list[str]] = {}
        for name in placements:
            by_shard.setdefault(mine[tensors[name].main], []).append(name)
        for shard in sorted(by_shard):
            with self._open(shard) as file:
                for name in by_shard[shard]:
                    self._load(file, shard, tensors[name], placements[name])

    def require_only(self, prefixes: Iterable[str]) -> None:
        """Check that every stored tensor belongs to one of the parts that are being loaded.

        Raises:
            WeightError: names the tensors that start with none of ``prefixes``.
        """
        known = tuple(prefixes)
        others = [name for name in self.shards if not name.startswith(known)]
        if others:
            raise WeightError(
                f"{self.directory}: {_listed(others)} left over: under none of {', '.join(known)}"
            )

    # ------------------------------------------------------------------ files

    def _read_shards(self) -> dict[str, str]:
        if not has_weights(self.directory):
            raise WeightError(
                f"{self.directory}: no weights (neither {INDEX_NAME} nor {SINGLE_NAME})"
            )
        index = self.directory / INDEX_NAME
        try:
            return _parse_index(index.read_text(encoding="utf-8"), index)
        except FileNotFoundError:
            with self._open(SINGLE_NAME) as file:
                return dict.fromkeys(file.keys(), SINGLE_NAME)
        except (OSError, UnicodeDecodeError) as exc:
            raise WeightError(f"{index}: cannot be read ({type(exc).__name__})") from exc

    def _specs(self, names: Mapping[str, str]) -> dict[str, TensorSpec]:
        by_shard: dict[str, list[str]] = {}
        for name, shard in names.items():
            by_shard.setdefault(shard, []).append(name)
        specs: dict[str, TensorSpec] = {}
        for shard in sorted(by_shard):
            with self._open(shard) as file:
                held = set(file.keys())
                path = self.directory / shard
                if lost := [name for name in by_shard[shard] if name not in held]:
                    raise WeightError(f"{path}: {_listed(lost)} missing, though the index names it")
                if extra := [name for name in held if self.shards.get(name) != shard]:
                    raise WeightError(f"{path}: {_listed(sorted(extra))} left over, by the index")
                for name in by_shard[shard]:
                    specs[name] = _spec(file.get_slice(name), name, path)
        return specs

    @contextmanager
    def _open(self, shard: str) -> Iterator[_ShardFile]:
        """One shard, mapped into memory; whatever goes wrong inside is put in words."""
        path = self.directory / shard
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                yield cast("_ShardFile", file)
        except FileNotFoundError as exc:
            raise WeightError(f"{path}: no such file, though the index names it") from exc
        except SafetensorError as exc:
            raise WeightError(f"{path}: damaged or not a safetensors file ({exc})") from exc
        except OSError as exc:
            raise WeightError(f"{path}: cannot be read ({type(exc).__name__})") from exc

    # ------------------------------------------------------------------ data

    def _load(
        self,
        file: _ShardFile,
        shard: str,
        tensor: LogicalTensor,
        place: Placement | StoredPlacement,
    ) -> None:
        values, share = file.get_tensor(tensor.main), place.share
        if tensor.scale is None:
            assert isinstance(place, Placement)
            target = place.target.detach()
            shape = whole_shape(target.shape, share)
            values = values.flatten()[: math.prod(shape)].view(shape)
            target.copy_(values if share is None else share.of(values))
            return
        if self.shards[tensor.scale] == shard:
            scale = file.get_tensor(tensor.scale)
        else:
            with self._open(self.shards[tensor.scale]) as other:
                scale = other.get_tensor(tensor.scale)
        _check_scale(scale, tensor)
        if isinstance(place, Placement):
            _decode(values, scale, tensor, place)
            return
        if share is not None:
            values, scale = share.of(values), share.of(scale)
        try:
            place.take(values, scale)
        except WeightError as exc:
            raise WeightError(f"{self.directory / shard}: {tensor.main}: {exc}") from exc


def _check_scale(scale: torch.Tensor, tensor: LogicalTensor) -> None:
    bad = (scale == NAN_SCALE) if tensor.encoding == "mxfp4" else ~scale.isfinite()
    if bad.any():
        raise WeightError(
            f"{tensor.scale}: {int(bad.sum())} of {bad.numel()} scales are not numbers"
        )


def _decode(
    values: torch.Tensor, scale: torch.Tensor, tensor: LogicalTensor, place: Placement
) -> None:
    """Decode row by row into the target; no second copy of the whole tensor is made."""
    decode = dequantize_mxfp4 if tensor.encoding == "mxfp4" else dequantize_int8
    target, share = place.target.detach(), place.share
    if share is not None and share.axis == 0:
        values, scale, share = share.of(values), share.of(scale), None
    step = max(1, _DECODE_VALUES * tensor.shape[0] // tensor.numel)
    for first in range(0, values.shape[0], step):
        rows = slice(first, first + step)
        moved = (values[rows].to(target.device), scale[rows].to(target.device))
        decoded = decode(*moved, dtype=target.dtype)
        target[rows].copy_(decoded if share is None else share.of(decoded))


def _check_place(name: str, tensor: LogicalTensor, place: Placement | StoredPlacement) -> None:
    if isinstance(place, StoredPlacement):
        shape = whole_shape(place.shape, place.share)
        if (tensor.shape, tensor.encoding) != (shape, place.encoding):
            raise WeightError(
                f"{name} is {list(tensor.shape)} ({tensor.encoding}), the model needs "
                f"{list(shape)} ({place.encoding})"
            )
        return
    assert not place.target.is_meta, f"{name}: the target has no memory yet"
    expected = whole_shape(place.target.shape, place.share)
    if place.leading:
        if tensor.encoding != "plain" or tensor.numel < math.prod(expected):
            raise WeightError(
                f"{name} has {tensor.numel} values ({tensor.encoding}), "
                f"at least {math.prod(expected)} plain ones are needed"
            )
    elif tensor.shape != expected:
        raise WeightError(f"{name} is {list(tensor.shape)}, the model needs {list(expected)}")


def _parse_index(text: str, path: Path) -> dict[str, str]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as exc:
        raise WeightError(f"{path}: not JSON (line {exc.lineno})") from exc
    shards = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise WeightError(f"{path}: field 'weight_map' is missing or empty")
    for name, shard in shards.items():
        # A name with a separator would let a checkpoint read files outside its directory.
        if not isinstance(shard, str) or not shard or "/" in shard or "\\" in shard:
            raise WeightError(f"{path}: the file of {name} is not a plain file name")
    return shards


def _spec(part: Any, name: str, path: Path) -> TensorSpec:
    if (dtype := _DTYPES.get(part.get_dtype())) is None:
        raise WeightError(f"{path}: {name} has dtype {part.get_dtype()}, which is not known")
    return TensorSpec(tuple(part.get_shape()), dtype)


def require_same_names(found: Iterable[str], expected: Iterable[str], origin: str) -> None:
    """Compare two sets of logical names.

    Raises:
        WeightError: says how many are missing and left over, and names the first few of each.
    """
    found, expected = set(found), set(expected)
    missing, left_over = sorted(expected - found), sorted(found - expected)
    parts = []
    if missing:
        parts.append(f"{_listed(missing)} missing")
    if left_over:
        parts.append(f"{_listed(left_over)} left over")
    if parts:
        raise WeightError(f"{origin}: {'; '.join(parts)} (of {len(expected)} expected)")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    noun = "tensor" if len(names) == 1 else "tensors"
    return f"{len(names)} {noun} ({', '.join(names[:_NAMED])}{more})"


def _dtype(spec: TensorSpec) -> str:
    return str(spec.dtype).removeprefix("torch.")


def _shown(spec: TensorSpec) -> str:
    return f"{_dtype(spec)} {list(spec.shape)}"
