"""A WebDataset tar of pictures with their captions.

Each sample is ``key.<ending>`` (the media as it came), ``key.txt`` and ``key.json`` (the row), in
this order; the key is made of the item's name and a digest of its id. While a run goes on the file
is ``NAME.partial``. A sample is written before the journal has its row, so after a kill the tail
behind the last sample that the journal knows is cut off and made again. A sample that is made anew
is added like any other; the old one is left out at the end.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tarfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from k3vl.app.captioning.durable import cannot_write, replacing, sync_file
from k3vl.app.captioning.items import make_key
from k3vl.app.output import json_line
from k3vl.vision.sniff import HEAD_BYTES, sniff

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k3vl.app.captioning.items import Key
    from k3vl.app.captioning.journal import Journal
    from k3vl.app.captioning.rows import Row

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
_ENDINGS = {
    "JPEG": "jpg",
    "PNG": "png",
    "GIF": "gif",
    "TIFF": "tif",
    "WEBP": "webp",
    "BMP": "bmp",
    "AVIF": "avif",
    "PPM": "ppm",
    "matroska": "mkv",
    "asf": "wmv",
    "mpegts": "ts",
    "mov": "mp4",
    "avi": "avi",
    "flv": "flv",
    "ogg": "ogv",
    "mpeg": "mpg",
}
_BLOCK = 512


class TarOutput:
    """One shard, appended to."""

    def __init__(self, path: Path, *, afresh: bool) -> None:
        """Open it.

        Args:
            path: where the finished shard goes.
            afresh: an old shard that no journal knows gives way when the new one is done.

        Raises:
            ConfigError: it cannot be written.
        """
        self.path = path
        self._partial = path.with_name(f"{path.name}.partial")
        self._afresh = afresh
        self._keys: set[Key] = set()
        self._replaced = False
        self._file: IO[bytes] | None = None
        try:
            self._partial.open("ab").close()
            if self._partial.stat().st_size == 0:
                self._partial.unlink()
        except OSError as exc:
            raise cannot_write(path, exc) from exc

    def recover(self, journal: Journal) -> None:
        """Go on behind the last sample that the journal knows."""
        try:
            if not self._partial.exists() and self.path.exists() and not self._afresh:
                self.path.rename(self._partial)
            elif self._afresh and not journal.resumed and self._partial.exists():
                self._partial.unlink()
            file = self._partial.open("rb+" if self._partial.exists() else "wb+")
            self._file = file
            file.truncate(self._sound_length(file, journal))
            file.seek(0, os.SEEK_END)
        except OSError as exc:
            raise cannot_write(self.path, exc) from exc

    def _sound_length(self, file: IO[bytes], journal: Journal) -> int:
        """Bytes up to the end of the last sample whose caption is in the journal."""
        sound = 0
        for key, _, end in _samples(file):
            if not journal.is_captioned(key):
                break
            self._note(key)
            sound = end
        return sound

    def _note(self, key: Key) -> None:
        self._replaced |= key in self._keys
        self._keys.add(key)

    def lacks(self, key: Key) -> bool:
        """Whether it has no sample of this caption."""
        return key not in self._keys

    def add(self, row: Row, media: bytes | None) -> None:
        """Add a sample; a row without a caption or media is none."""
        if "error" in row or media is None:
            return
        assert self._file is not None, "recovered first"
        key = sample_key(row)
        parts = {
            media_ending(media): media,
            "txt": row["caption"].encode("utf-8", "backslashreplace"),
            "json": json_line(row).encode(),
        }
        try:
            for ending, data in parts.items():
                self._file.write(_member(f"{key}.{ending}", data))
            self._file.flush()
            self._note(make_key(row["id"], row["prompt_id"]))
        except OSError as exc:
            raise cannot_write(self.path, exc) from exc

    def sync(self) -> None:
        """See :class:`k3vl.app.captioning.outputs.Output`."""
        assert self._file is not None, "recovered first"
        sync_file(self._file, self.path)

    def finish(self, journal: Journal) -> None:
        """End the archive and put it in its place."""
        del journal
        assert self._file is not None, "recovered first"
        try:
            if self._replaced:
                with replacing(self.path) as file:
                    self._copy_last_samples(self._file, file)
                self._file.close()
                self._partial.unlink()
                return
            self._file.write(bytes(2 * _BLOCK))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._partial.replace(self.path)
        except OSError as exc:
            raise cannot_write(self.path, exc) from exc

    def _copy_last_samples(self, source: IO[bytes], target: IO[bytes]) -> None:
        """All samples but those that later ones replaced."""
        source.flush()
        last = {key: start for key, start, _ in _samples(source)}
        for key, start, end in _samples(source):
            if last[key] == start:
                source.seek(start)
                target.write(source.read(end - start))
        target.write(bytes(2 * _BLOCK))

    def close(self) -> None:
        """See :class:`k3vl.app.captioning.outputs.Output`."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # what a full disk did not take was told already
                self._file.close()


def _samples(file: IO[bytes]) -> Iterator[tuple[Key, int, int]]:
    """Keys, begins and ends of the samples of a shard, up to where it is damaged or torn."""
    start = 0
    file.seek(0)
    with (
        contextlib.suppress(tarfile.TarError, EOFError, OSError, ValueError, KeyError, TypeError),
        tarfile.open(fileobj=file, mode="r:") as tar,
    ):
        for member in tar:
            if not member.name.endswith(".json"):
                continue
            content = tar.extractfile(member)
            row = json.loads(content.read()) if content else {}
            end = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
            yield make_key(row["id"], row["prompt_id"]), start, end
            start = end
            tar.members = []  # type: ignore[attr-defined]  # else it keeps every header


def sample_key(row: Row) -> str:
    """A name without dots that no other item and prompt has."""
    stem = _UNSAFE.sub("-", Path(row["id"]).stem)[:60].strip("-") or "item"
    return f"{stem}-{make_key(row['id'], row['prompt_id']).hex()[:16]}"


def media_ending(data: bytes) -> str:
    """A file ending by content, as WebDataset readers choose their decoder by it."""
    return _ENDINGS.get(sniff(data[:HEAD_BYTES]).decoder, "bin")


def _member(name: str, data: bytes) -> bytes:
    """Header, content and padding; times and owners are left out, so equal runs are equal."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    stream = io.BytesIO()
    stream.write(info.tobuf(tarfile.USTAR_FORMAT))
    stream.write(data)
    stream.write(bytes(-len(data) % _BLOCK))
    return stream.getvalue()
