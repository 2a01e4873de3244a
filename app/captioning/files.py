"""Local files and folders as sources; nothing is opened here but folders and lists of names."""

from __future__ import annotations

import fnmatch
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3vl.app.captioning.items import Source

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".mpo", ".png", ".apng", ".webp", ".gif", ".bmp"),
    *(".tif", ".tiff", ".ppm", ".pgm", ".avif", ".heic"),
)
VIDEO_SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".m2ts"),
    *(".wmv", ".flv", ".3gp", ".ogv"),
)
MEDIA_SUFFIXES = (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which files of a folder are taken.

    Attributes:
        include: globs over the path below the folder, or over the bare name; empty takes all media.
        exclude: globs that win over ``include``; they also keep whole folders out.
        follow_symlinks: also take links, and go through linked folders, each once.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    follow_symlinks: bool = False

    def takes(self, inside: str) -> bool:
        """Whether a file is taken; ``inside`` is its path below the folder, with slashes.

        ``._a.jpg`` is none: macOS keeps a file's attributes there on foreign disks.
        """
        if _matches(inside, self.exclude) or inside.rpartition("/")[2].startswith("._"):
            return False
        if self.include:
            return _matches(inside, self.include)
        return os.path.splitext(inside)[1].lower() in MEDIA_SUFFIXES


def _matches(inside: str, globs: Sequence[str]) -> bool:
    name = inside.rpartition("/")[2]
    return any(fnmatch.fnmatch(inside, glob) or fnmatch.fnmatch(name, glob) for glob in globs)


def walk(folder: Path, choice: Choice) -> Iterator[Path]:
    """Files of a folder, sorted by path, one folder in memory at a time."""
    yield from _walk(folder, "", choice, frozenset())


def _walk(folder: Path, inside: str, choice: Choice, above: frozenset[str]) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return
    if choice.follow_symlinks:
        real = os.path.realpath(folder)
        if real in above:  # a link to a folder that we are in
            return
        above |= {real}
    for entry in found:
        path = f"{inside}{entry.name}"
        if entry.is_symlink() and not choice.follow_symlinks:
            continue
        if entry.is_dir():
            if not _matches(path, choice.exclude):
                yield from _walk(folder / entry.name, f"{path}/", choice, above)
        elif entry.is_file() and choice.takes(path):
            yield folder / entry.name


def is_folder(path: Path) -> bool:
    """Unlike :meth:`Path.is_dir` False, not an error, for a name that cannot be looked up."""
    return os.path.isdir(path)


def file_source(path: Path, name: str | None = None) -> Source:
    """A local file; ``name`` is how it was given."""
    shown = str(path) if name is None else name
    return Source(id=shown, path=shown, media=path, beside=path)
