"""Sidecars: one small file beside each picture, written whole or not at all."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from k3vl.app.captioning.durable import cannot_write, write_whole
from k3vl.app.output import json_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3vl.app.captioning.items import Item, Source

Policy = Literal["skip", "overwrite", "append", "prepend", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecars:
    """Where sidecars go and what they are called.

    Attributes:
        endings: ``txt``, ``caption``, ``json``; none where no sidecars are wanted.
        whole_name: ``a.jpg.txt`` in place of ``a.txt``.
        folder: a tree of their own in place of the pictures'.
        roots: folders given on the command line; the tree below them is kept.
        several: prompts get sidecars of their own, named after them.
    """

    endings: tuple[str, ...] = ()
    whole_name: bool = False
    folder: Path | None = None
    roots: tuple[Path, ...] = ()
    several: bool = False

    def base(self, source: Source) -> Path | None:
        """What a source's sidecars are named after, without their ending."""
        if source.beside is None:
            return None
        place = source.beside
        if self.folder is not None:
            place = self.folder / self._inside(place)
        return place if self.whole_name else place.with_suffix("")

    def _inside(self, path: Path) -> Path:
        """The path below the folder it was found in; just the name for a file given by itself."""
        for root in self.roots:
            if path.is_relative_to(root):
                return path.relative_to(root)
        return Path(path.name)

    def paths(self, item: Item, prompt_id: str) -> list[Path]:
        """The sidecars of a caption."""
        base = self.base(item.source)
        if base is None:
            return []
        stem = base.name + item.piece.name + (f".{prompt_id}" if self.several else "")
        return [base.with_name(f"{stem}.{ending}") for ending in self.endings]

    def contents(
        self, item: Item, prompt_id: str, row: dict[str, Any], policy: Policy
    ) -> dict[str, str]:
        """Paths and whole contents for a caption; appending reads what is there.

        Raises:
            ConfigError: an old sidecar cannot be read.
        """
        found = {}
        for path in self.paths(item, prompt_id):
            if path.suffix == ".json":
                found[str(path)] = json_line(row)
                continue
            lines = [row["caption"]]
            old = read_sidecar(path) if policy in ("append", "prepend") else None
            if old:
                lines = [old, *lines] if policy == "append" else [*lines, old]
            found[str(path)] = "\n".join(lines) + "\n"
        return found


NO_SIDECARS = Sidecars()


def read_sidecar(path: Path) -> str | None:
    """An old caption without its last line ends; None where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").rstrip("\r\n")
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise cannot_write(path, exc) from exc


def old_caption(source: Source, sidecars: Sidecars) -> str:
    """What a prompt's ``{caption}`` stands for: a column, or an old sidecar of any kind."""
    if "caption" in source.columns:
        return source.columns["caption"]
    if not isinstance(source.media, Path):
        return ""
    bases = [sidecars.base(source), source.media.with_suffix(""), source.media]
    for base in bases:
        for ending in ("txt", "caption"):
            if base is not None and (text := read_sidecar(base.with_name(f"{base.name}.{ending}"))):
                return text
    return ""


def write_sidecars(contents: dict[str, str]) -> None:
    """Write sidecars atomically; writing the same again changes nothing.

    Raises:
        ConfigError: one cannot be written.
    """
    for name, text in contents.items():
        path = Path(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text.encode("utf-8", "surrogateescape"))
        except OSError as exc:
            raise cannot_write(path, exc) from exc


def existing(paths: Sequence[Path]) -> bool:
    """Whether a caption is there already."""
    return any(os.path.exists(path) for path in paths)
