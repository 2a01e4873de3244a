"""WebDataset shards as sources: tar files, plain or compressed, read once from front to back.

Members that share a name up to the first dot are one sample. A sample that cannot be used, or a
shard that ends early, spoils nothing that came before it.
"""

from __future__ import annotations

import json
import os
import tarfile
import zlib
from typing import TYPE_CHECKING

from k3vl.app.captioning.files import MEDIA_SUFFIXES
from k3vl.app.captioning.items import Source
from k3vl.app.captioning.tables import as_text
from k3vl.errors import ConfigError, MediaError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_MAX_MEMBER = 256 * 2**20
_ERRORS = (tarfile.TarError, EOFError, OSError, zlib.error)


def is_shard(name: str) -> bool:
    """Whether a name is that of a shard."""
    return name.lower().endswith(SHARD_SUFFIXES)


def shard_sources(shard: Path) -> Iterator[Source]:
    """One source for each sample, named ``shard/key``.

    Raises:
        ConfigError: there is no such file.
    """
    if not os.path.isfile(shard):
        raise ConfigError(f"{shard}: no such file")
    key, members = "", dict[str, bytes | MediaError]()
    try:
        for name, data in _members(shard):
            folder, _, base = name.rpartition("/")
            stem, _, ending = base.partition(".")
            following = f"{folder}/{stem}" if folder else stem
            if following != key and members:
                yield _sample(shard, key, members)
                members = {}
            key = following
            members["." + ending.lower()] = data
    except MediaError as exc:
        if members:
            yield _sample(shard, key, members)
        yield Source(id=f"{shard}", path=str(shard), error=exc)
        return
    if members:
        yield _sample(shard, key, members)


def _members(shard: Path) -> Iterator[tuple[str, bytes | MediaError]]:
    """Names and contents; the end of what can be read is an error."""
    try:
        with tarfile.open(shard, "r|*") as tar:
            for member in tar:
                if not member.isfile():
                    continue
                if member.size > _MAX_MEMBER:
                    yield (
                        member.name,
                        MediaError(
                            f"{member.size} bytes, at most {_MAX_MEMBER} are accepted",
                            code="media_too_large",
                        ),
                    )
                    continue
                file = tar.extractfile(member)
                data = file.read() if file else b""
                if len(data) < member.size:
                    raise EOFError
                yield member.name, data
    except _ERRORS as exc:
        raise MediaError("the shard ends early or is damaged", code="shard_damaged") from exc


def _sample(shard: Path, key: str, members: dict[str, bytes | MediaError]) -> Source:
    name = f"{shard}/{key}"
    found = next((ending for ending in members if ending.endswith(MEDIA_SUFFIXES)), None)
    if found is None:
        error = MediaError(
            f"no picture or clip in this sample: {', '.join(members)}", code="row_invalid"
        )
        return Source(id=name, path=name, error=error)
    media = members[found]
    columns: dict[str, str] = {}
    for ending, data in members.items():
        if not isinstance(data, bytes):
            continue
        if ending in (".txt", ".caption"):
            columns["caption"] = data.decode("utf-8", "replace").strip()
        elif ending == ".json":
            columns |= _json_columns(data)
    if isinstance(media, MediaError):
        return Source(id=name, path=name, columns=columns, error=media, repeats=False)
    beside = shard.parent / (shard.name.partition(".")[0]) / (key + found)
    return Source(id=name, path=name, media=media, beside=beside, columns=columns, repeats=False)


def _json_columns(data: bytes) -> dict[str, str]:
    try:
        record = json.loads(data)
    except ValueError:
        return {}
    if not isinstance(record, dict):
        return {}
    return {name: text for name, v in record.items() if (text := as_text(v)) is not None}
