"""The drawings: names, sprite sheets, drawing styles, and which of them are held out.

An atlas is a folder with ``concepts.json`` (names and groups), sprite lists ``train.json`` and
``unseen-*.json``, perhaps ``more-*.json`` (sheet, row, column, code point, drawing set) and the
sheets themselves: WebP pictures of 96-pixel cells. It is not part of the package. Nothing here
draws.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from k3vl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from numpy.typing import NDArray

CELL = 96
"""Side of one sprite in pixels."""

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (245, 210, 40),
    "orange": (245, 140, 30),
    "purple": (140, 60, 180),
    "pink": (245, 130, 180),
    "brown": (130, 80, 40),
    "black": (25, 25, 25),
    "white": (245, 245, 245),
    "gray": (130, 130, 130),
    "cyan": (50, 200, 220),
}
COLOUR_NAMES = tuple(COLOURS)
COLOUR_RGB = np.array(list(COLOURS.values()), np.float32) / 255

SHAPES = (
    "circle",
    "square",
    "triangle",
    "diamond",
    "pentagon",
    "hexagon",
    "ring",
    "cross",
    "star",
    "heart",
    "crescent",
    "rectangle",
)

TRAIN, HELD, MORE = "train", "held", "more"
"""Styles: drawings that are trained on, unseen (name, drawing set) cells of the same sets, and
further drawings for training only (line icons), which no figure is measured on."""

INK_SUFFIX = "-ink"
"""Ends the set names of drawings that are black ink and nothing else."""


def is_one_colour(drawing_set: str) -> bool:
    """Whether a set is drawn in one colour, to be tinted."""
    return drawing_set == "fluent-hc" or drawing_set.endswith(INK_SUFFIX)


# One artist's drawings: a cell held out in one of them is held out in all.
_FAMILY = {"fluent-emoji-flat": "fluent", "fluent-3d": "fluent", "fluent-hc": "fluent"}
# Too few or too mixed to say anything as a style of their own.
_NEVER_HELD = ("openclipart", "flat-color-icons")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sprite:
    """One drawing: where it lies, what it shows, who drew it.

    Attributes:
        row, column: cell in the sheet.
        name: index into :attr:`Atlas.names`.
        drawing_set: package it came from.
        style: ``train`` or the name of an unseen set.
    """

    sheet: str
    row: int
    column: int
    name: int
    drawing_set: str
    style: str


@dataclass(frozen=True)
class Atlas:
    """All drawings of a folder, by index; the pixels are read when asked for.

    Attributes:
        folder: where the sheets lie.
        names: lower-case names in code point order; their indices are class labels.
        groups: CLDR subgroup of every name.
        sprites: training sprites first, then unseen styles.
    """

    folder: Path
    names: tuple[str, ...]
    groups: tuple[str, ...]
    sprites: tuple[Sprite, ...]
    held: frozenset[int] = field(default=frozenset())

    @property
    def n_classes(self) -> int:
        """Labels of a dense cell: names, shapes, text, ground."""
        return len(self.names) + len(SHAPES) + 2

    @property
    def text_label(self) -> int:
        """Label of a cell covered by printed text."""
        return len(self.names) + len(SHAPES)

    @property
    def ground_label(self) -> int:
        """Label of an empty cell."""
        return len(self.names) + len(SHAPES) + 1

    @property
    def styles(self) -> tuple[str, ...]:
        """``train``, ``held`` and the unseen sets found in the folder."""
        unseen = sorted({sprite.style for sprite in self.sprites} - {TRAIN, MORE})
        return (TRAIN, HELD, *unseen)

    @property
    def all_styles(self) -> frozenset[str]:
        """Styles of the folder's lists, those for training only among them."""
        return frozenset(sprite.style for sprite in self.sprites)

    def by_name(self, style: str) -> dict[int, list[int]]:
        """Name index -> sprite indices of one style.

        Raises:
            ConfigError: the folder holds no drawing of this style.
        """
        found: dict[int, list[int]] = defaultdict(list)
        for index, sprite in enumerate(self.sprites):
            own = HELD if index in self.held else sprite.style
            if own == style:
                found[sprite.name].append(index)
        if not found:
            raise ConfigError(f"{self.folder}: no drawings of style {style!r}")
        return dict(found)

    def only(self, drawing_sets: Collection[str]) -> Atlas:
        """The same names with the drawings of these sets alone."""
        kept = [i for i, s in enumerate(self.sprites) if s.drawing_set in drawing_sets]
        return replace(
            self,
            sprites=tuple(self.sprites[i] for i in kept),
            held=frozenset(new for new, old in enumerate(kept) if old in self.held),
        )

    def pixels(self) -> NDArray[np.uint8]:
        """[sprites, 96, 96, 4] RGBA of every sprite, in order."""
        files = sorted({sprite.sheet for sprite in self.sprites})

        def read(name: str) -> NDArray[np.uint8]:
            with Image.open(self.folder / name) as image:
                return np.asarray(image.convert("RGBA"))

        with ThreadPoolExecutor(8) as pool:
            sheets = dict(zip(files, pool.map(read, files), strict=True))
        return np.stack(
            [
                sheets[s.sheet][s.row * CELL : (s.row + 1) * CELL, s.column * CELL :][:, :CELL]
                for s in self.sprites
            ]
        )

    def picture(self, sprite: int) -> Image.Image:
        """One sprite as an RGBA picture."""
        found = self.sprites[sprite]
        left, top = found.column * CELL, found.row * CELL
        with Image.open(self.folder / found.sheet) as image:
            return image.crop((left, top, left + CELL, top + CELL)).convert("RGBA")


def load_atlas(folder: Path) -> Atlas:
    """Read an atlas folder's lists.

    Raises:
        ConfigError: a list is missing or is not what it should be.
    """
    try:
        concepts = {c["hex"]: c for c in json.loads((folder / "concepts.json").read_text("utf-8"))}
        lists = [(TRAIN, json.loads((folder / "train.json").read_text("utf-8")))]
        lists += [
            (path.stem.removeprefix("unseen-"), json.loads(path.read_text("utf-8")))
            for path in sorted(folder.glob("unseen-*.json"))
        ]
        lists += [
            (MORE, json.loads(path.read_text("utf-8")))
            for path in sorted(folder.glob("more-*.json"))
        ]
        code_points = sorted({row["hex"] for row in lists[0][1]})
        index = {point: i for i, point in enumerate(code_points)}
        sprites = tuple(
            Sprite(
                sheet=row["sheet"],
                row=row["row"],
                column=row["col"],
                name=index[row["hex"]],
                drawing_set=row["set"],
                style=style,
            )
            for style, rows in lists
            for row in rows
            if row["hex"] in index
        )
        names = tuple(concepts[p]["name"].replace("\u2019", "'").lower() for p in code_points)
        groups = tuple(concepts[p]["sub"] for p in code_points)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"{folder}: not an atlas folder ({exc})") from exc
    return Atlas(folder, names, groups, sprites, _held_cells(sprites, code_points))


def _held_cells(sprites: tuple[Sprite, ...], code_points: list[str]) -> frozenset[int]:
    """Eight per cent of the (name, family of sets) cells, where three families draw the name."""
    families: dict[int, set[str]] = defaultdict(set)
    for sprite in sprites:
        if sprite.style == TRAIN:
            families[sprite.name].add(_FAMILY.get(sprite.drawing_set, sprite.drawing_set))
    return frozenset(
        index
        for index, sprite in enumerate(sprites)
        if sprite.style == TRAIN
        and sprite.drawing_set not in _NEVER_HELD
        and len(families[sprite.name]) >= 3
        and is_held(code_points[sprite.name], sprite.drawing_set)
    )


def is_held(code_point: str, drawing_set: str) -> bool:
    """The fixed rule: MD5 of ``code point/family`` modulo 100 is below 8."""
    key = f"{code_point}/{_FAMILY.get(drawing_set, drawing_set)}".encode()
    return int(hashlib.md5(key, usedforsecurity=False).hexdigest(), 16) % 100 < 8
