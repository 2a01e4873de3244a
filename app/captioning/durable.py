"""Files that are never half there."""

from __future__ import annotations

import contextlib
import errno
import os
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from k3vl.app.output import printable
from k3vl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Write a file beside ``path`` and put it in its place once its bytes are on the disk.

    Where the body fails nothing changes.

    Raises:
        OSError: it cannot be written.
    """
    # Always the same name: what a killed process left is overwritten when its work is done again.
    beside = path.with_name(f".{path.name[:180]}.partial")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file at once; see :func:`replacing`."""
    with replacing(path) as file:
        file.write(data)


def write_all(descriptor: int, data: bytes) -> None:
    """Append by one ``write``; a disk that takes only a part of it is full.

    Raises:
        OSError: it cannot be written.
    """
    if os.write(descriptor, data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def try_place(path: Path) -> None:
    """Find out whether a file can be put somewhere, before any work; what is there stays.

    Raises:
        ConfigError: it cannot.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        probe = path.with_name(f"{path.name}.probe")
        with replacing(probe):
            pass
        probe.unlink()
    except OSError as exc:
        raise cannot_write(path, exc) from exc


def sync_file(file: IO[bytes], path: Path) -> None:
    """Put on the disk what was written so far.

    Raises:
        ConfigError: the disk is full, or fails.
    """
    try:
        os.fsync(file.fileno())
    except OSError as exc:
        raise cannot_write(path, exc) from exc


def cannot_write(path: Path, exc: OSError) -> ConfigError:
    """The one line for an output that cannot be written."""
    return ConfigError(f"{printable(path)}: cannot be written ({exc.strerror})")
