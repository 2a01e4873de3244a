"""Checkpoint directories: tensors to safetensors shards.

Here: cutting into shards, and the index. Not here: reading (``checkpoint.py``).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from k3vl.checkpoint import INDEX_NAME, SINGLE_NAME, TensorSpec
from k3vl.errors import WeightError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch


def save_checkpoint(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    json_files: Mapping[str, Mapping[str, Any]],
    max_shard_bytes: int = 4 << 30,
) -> None:
    """Write stored tensors and configuration files as a checkpoint directory.

    See :func:`write_checkpoint`; ``tensors`` are stored name -> tensor, already encoded.

    Raises:
        WeightError: the directory holds weights, or cannot be written.
    """
    specs = {n: TensorSpec(tuple(t.shape), t.dtype) for n, t in tensors.items()}
    write_checkpoint(
        directory,
        specs,
        # safetensors refuses views that share memory; clones own theirs.
        lambda name: tensors[name].detach().cpu().clone().contiguous(),
        json_files=json_files,
        max_shard_bytes=max_shard_bytes,
    )


def write_checkpoint(
    directory: Path,
    specs: Mapping[str, TensorSpec],
    make: Callable[[str], torch.Tensor],
    *,
    json_files: Mapping[str, Mapping[str, Any]],
    max_shard_bytes: int = 4 << 30,
) -> None:
    """Write a checkpoint directory shard by shard; no more than one shard is in memory.

    One file if everything fits into ``max_shard_bytes``, else numbered shards in the order given
    and an index. A single tensor may exceed the limit; it then has a shard to itself.

    Args:
        directory: made if need be; must not hold weights yet.
        specs: stored name -> what it will be.
        make: stored name -> the tensor, in memory of its own.
        json_files: file name -> content (``config.json``, ...).
        max_shard_bytes: of tensor data in one file.

    Raises:
        WeightError: the directory holds weights, or cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.glob("*.safetensors")) or (directory / INDEX_NAME).exists():
            raise WeightError(f"{directory}: holds weights already; remove them first")
        for name, content in json_files.items():
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            (directory / name).write_text(text, encoding="utf-8")
        shards = _split(specs, max_shard_bytes)
        if len(shards) == 1:
            _write_shard(shards[0], make, directory / SINGLE_NAME)
            return
        weight_map = {}
        for number, names in enumerate(shards, start=1):
            file_name = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
            _write_shard(names, make, directory / file_name)
            weight_map.update(dict.fromkeys(names, file_name))
        total = sum(spec.nbytes for spec in specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as exc:
        raise WeightError(f"{directory}: cannot be written ({exc})") from exc


def _write_shard(names: Sequence[str], make: Callable[[str], torch.Tensor], path: Path) -> None:
    save_file({name: make(name) for name in names}, path, metadata={"format": "pt"})


def _split(specs: Mapping[str, TensorSpec], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += spec.nbytes
    return shards
