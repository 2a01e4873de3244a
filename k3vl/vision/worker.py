"""The process that decodes media for a server: requests on stdin, answers on stdout.

A decoder that hangs, eats memory or dies takes only this process with it. Frames are a length, a
JSON header, a length and raw bytes; no pickle. Patches lie in a file without a name that both ends
hold, where the system has such files: a pipe takes 64 KiB at a time, and before each piece the
server's thread would wait for its event loop. The other end is ``workers.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from pydantic import TypeAdapter

from k3vl.config import MediaConfig
from k3vl.errors import MediaError
from k3vl.types import MediaPart
from k3vl.vision.data_uri import decode_data_uri
from k3vl.vision.limits import MediaLimits
from k3vl.vision.portable import portable
from k3vl.vision.processor import MediaProcessor
from k3vl.vision.source import FetchPolicy

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from k3vl.types import MediaKind, ProcessedMedia

MediaForm: TypeAlias = Literal["patches", "frames", "clips"]
"""What a worker makes: patches for a model here; ``data:`` URLs for another server, of a clip's
frames or of the whole clip (see ``portable.py``)."""
SourceForm: TypeAlias = Literal["bytes", "data", "path", "url"]
"""What a request's blob is: a file, the text of a ``data:`` URL, a local path that no request
named but the caller, or another URL that needs no network."""
_LENGTHS = struct.Struct("<IQ")
_KEPT_BYTES = 16 * 2**20
_PIECE = 1 << 18


def write_frame(
    file: IO[bytes], header: dict[str, Any], blobs: Iterable[memoryview | str] = ()
) -> None:
    """Write one frame; the blobs are joined.

    Text is written as ASCII, what is not becomes ``?``; no second copy of it is made.
    """
    blobs = list(blobs)
    head, size = json.dumps(header).encode(), sum(map(_size, blobs))
    head = _LENGTHS.pack(len(head), size) + head
    if size <= _PIECE and not any(isinstance(blob, str) for blob in blobs):
        head, blobs = b"".join((head, *blobs)), []  # type: ignore[arg-type] # one call of the system
    file.write(head)
    for blob in blobs:
        if isinstance(blob, str):
            for start in range(0, len(blob), _PIECE):
                file.write(blob[start : start + _PIECE].encode("ascii", "replace"))
        elif blob.nbytes:
            file.write(blob.cast("B"))
    file.flush()


def read_frame(file: IO[bytes]) -> tuple[dict[str, Any], bytearray]:
    """Read one frame.

    Raises:
        EOFError: the other end is gone.
    """
    head_size, blob_size = _LENGTHS.unpack(_read(file, _LENGTHS.size))
    header: dict[str, Any] = json.loads(_read(file, head_size))
    return header, _read(file, blob_size)


def store(file: int, blobs: Iterable[memoryview]) -> None:
    """Write blobs one behind the other to the beginning of a file."""
    offset = 0
    for blob in blobs:
        view = blob.cast("B") if blob.nbytes else blob
        end = offset + view.nbytes
        while offset < end:
            offset += os.pwrite(file, view[view.nbytes - (end - offset) :], offset)


def fetch(file: int, sizes: Sequence[int]) -> list[memoryview]:
    """What :func:`store` wrote, in parts of so many bytes; long answers give their memory back.

    Raises:
        EOFError: the file is shorter.
    """
    parts = [np.empty(size, np.uint8).data for size in sizes]
    left, filled, total = parts, 0, sum(sizes)
    while filled < total:
        count = os.preadv(file, left, filled)
        if not count:
            raise EOFError
        filled += count
        left = _behind(parts, filled)
    if total > _KEPT_BYTES:
        os.ftruncate(file, 0)
    return parts


def _behind(parts: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of buffers of which so many bytes are filled."""
    left = []
    for part in parts:
        left.append(part[min(done, len(part)) :])
        done = max(0, done - len(part))
    return left


def _read(file: IO[bytes], size: int) -> bytearray:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        count = file.readinto(view[filled:])  # type: ignore[attr-defined] # every real file has it
        if not count:
            raise EOFError
        filled += count
    return data


def settings_header(
    config: MediaConfig,
    limits: MediaLimits,
    file_root: Path | None,
    max_bytes: int,
    form: MediaForm,
    max_memory: int,
    niceness: int,
) -> dict[str, Any]:
    """The first frame: what to process by."""
    return {
        "config": asdict(config),
        "limits": asdict(limits),
        "file_root": None if file_root is None else str(file_root),
        "max_bytes": max_bytes,
        "form": form,
        "max_memory": max_memory,
        "niceness": niceness,
    }


def make_processor(header: dict[str, Any]) -> MediaProcessor:
    """The processor that :func:`settings_header` describes; it never fetches."""
    root = header["file_root"]
    return MediaProcessor(
        TypeAdapter(MediaConfig).validate_python(header["config"]),
        limits=MediaLimits(**header["limits"]),
        policy=FetchPolicy(
            schemes=frozenset({"data"} if root is None else {"data", "file"}),
            file_root=None if root is None else Path(root),
            max_bytes=header["max_bytes"],
        ),
    )


def answer(
    processor: MediaProcessor, form: MediaForm, header: dict[str, Any], blob: bytearray
) -> Any:
    """Process one part, and empty its blob on the way; (header, blobs) of the answer."""
    part = MediaPart(header["kind"], b"", header["detail"])
    try:
        source = _source(part.kind, header["form"], blob, processor.policy.max_bytes)
        blob.clear()
        part = replace(part, source=source)
        if form == "patches":
            media = processor.process(part)
        else:
            media = portable(processor, part, whole_clips=form == "clips")
    except MediaError as exc:
        return {"error": str(exc), "code": exc.code}, ()
    except MemoryError:
        what = f"{part.kind}: needs more memory than is allowed for decoding"
        return {"error": what, "code": "media_too_large"}, ()
    except Exception as exc:  # noqa: BLE001 - a defect of ours or of a library ends one part
        what = f"{part.kind}: cannot be processed ({type(exc).__name__})"
        return {"error": what, "code": f"{part.kind}_failed"}, ()
    return describe(media), [*(item.patches.data for item in media.items), *media.urls]


def _source(
    kind: MediaKind, form: SourceForm, blob: bytearray, max_bytes: int
) -> str | bytes | Path:
    if form == "data":
        return decode_data_uri(blob, kind, max_bytes)
    if form == "path":
        return Path(os.fsdecode(bytes(blob)))
    return blob.decode() if form == "url" else bytes(blob)


def describe(media: ProcessedMedia) -> dict[str, Any]:
    """Everything but the patches."""
    return {
        "layout": asdict(media.layout),
        "items": [
            [item.digest, item.patches.shape, item.grid_thw, item.num_tokens]
            for item in media.items
        ],
        "frame_times": media.frame_times,
        "warnings": media.warnings,
        "url_lengths": [len(url) for url in media.urls],
    }


def limit_memory(size: int) -> None:
    """Let this process write to no more memory than this.

    ``RLIMIT_DATA`` counts what is really private and writable; an address space limit would count
    what threads only reserve. Windows has neither.
    """
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def main() -> None:
    """Serve until standard input ends."""
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get between the frames
    settings = read_frame(requests)[0]
    limit_memory(settings["max_memory"])
    if hasattr(os, "nice"):
        os.nice(settings["niceness"])
    processor, form, file = make_processor(settings), settings["form"], settings["file"]
    while True:
        try:
            header, blob = read_frame(requests)
        except EOFError:
            return
        replies, blobs = list[dict[str, Any]](), list[Any]()
        for head in header["parts"]:
            reply, own = answer(processor, form, head, _first(blob, head["size"]))
            replies.append({**reply, "size": sum(map(_size, own))})
            blobs += own
        is_stored = file is not None and form == "patches"
        if is_stored:
            store(file, blobs)
            blobs = []
        write_frame(answers, {"parts": replies, "stored": is_stored}, blobs)


def _first(blob: bytearray, size: int) -> bytearray:
    """Its first so many bytes, taken out; the last are no copy."""
    if size == len(blob):
        return blob
    first = blob[:size]
    del blob[:size]
    return first


def _size(blob: memoryview | str) -> int:
    return len(blob) if isinstance(blob, str) else blob.nbytes


if __name__ == "__main__":
    # The other end is gone: before there was anything to decode, or while it was being decoded.
    with contextlib.suppress(EOFError, BrokenPipeError):
        main()
