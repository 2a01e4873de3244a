"""Where the drawings come from: names, icon sets, clip art, photographs; from packages on the disk.

A package is a folder as its registry's client unpacks it. What a drawing shows is told by its code
point, else by its name; names come from CLDR through emojibase-data. Nothing here fetches or draws.
"""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from k3vl.demo.photos import PHOTOS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

GROUPS = ("animals-nature", "food-drink", "travel-places", "activities", "objects")
"""CLDR groups that are drawn; faces, people, flags and symbols are not."""

BY_CODE_POINT = ("noto", "noto-v1", "twemoji", "fluent-emoji-flat")
BY_NAME = ("fxemoji", "streamline-emojis", "flat-color-icons")
HIGH_CONTRAST = "fluent-emoji-high-contrast"
UNSEEN = ("openmoji", "emojione-v1")
"""Icon sets: known ones by how their drawings are found, and those that stay unseen."""

_CLOCK = re.compile(r"\u2019clock|-thirty$")
_QUOTES = "\u2019'\u201c\u201d"
# Folders of clip art that hold logos, symbols, doubles and people.
_NO_CLIP_ART = (
    ("computer",),
    ("shapes",),
    ("special",),
    ("signs_and_symbols",),
    ("unsorted", "duplicates"),
    ("office",),
    ("geography",),
    ("people",),
    ("games", "cards"),
)
_MAX_CLIP_ART_BYTES = 400_000
_INK = "#191919"


@dataclass(frozen=True, slots=True)
class Drawing:
    """One drawing to be: ``data`` is SVG text, or the bytes of a picture file.

    Attributes:
        hex: code point of what it shows, as emojibase writes it.
        drawing_set: who drew it.
        source: name in the package.
    """

    hex: str
    drawing_set: str
    source: str
    data: str | bytes


def read_concepts(emojibase: Path, chosen: Sequence[str] = GROUPS) -> list[dict[str, Any]]:
    """Names, slugs and groups of what is drawn, in CLDR's order.

    Args:
        emojibase: the package emojibase-data.
        chosen: CLDR groups.
    """
    entries = _json(emojibase / "en" / "data.json")
    messages = _json(emojibase / "en" / "messages.json")
    groups = {group["order"]: group["key"] for group in messages["groups"]}
    subgroups = {group["order"]: group["key"] for group in messages["subgroups"]}
    return [
        {
            "hex": entry["hexcode"],
            "name": entry["label"],
            "slug": slug(entry["label"]),
            "group": groups[entry["group"]],
            "sub": subgroups[entry["subgroup"]],
            "tags": entry.get("tags", []),
            "emoji": entry["emoji"],
        }
        for entry in entries
        if groups.get(entry.get("group", -1)) in chosen and not _CLOCK.search(entry["label"])
    ]


def slug(name: str) -> str:
    """``Mahjong: Red Dragon`` -> ``mahjong-red-dragon``."""
    plain = name.lower().replace("&", "and").translate(str.maketrans("", "", _QUOTES))
    letters = unicodedata.normalize("NFD", plain)
    plain = "".join(c for c in letters if not unicodedata.combining(c))
    return re.sub("[^a-z0-9]+", "-", plain).strip("-")


def code_points(text: str) -> str:
    """Code points in capitals without the emoji selector, which sets write or leave out."""
    return "-".join(p for p in text.upper().split("-") if p != "FE0F")


# ---------------------------------------------------------------------- icon sets


def icon_set(
    package: Path, concepts: Sequence[Mapping[str, Any]], drawing_set: str
) -> Iterator[Drawing]:
    """Drawings of an Iconify package: by code point where it lists them, else by name."""
    icons = _json(package / "icons.json")
    by_code_point: dict[str, str] = {}
    if (package / "chars.json").is_file() and drawing_set != HIGH_CONTRAST:
        listed = _json(package / "chars.json")
        by_code_point = {code_points(point): name for point, name in listed.items()}
    squashed = {_squash(name): name for name in icons["icons"]} if drawing_set in BY_NAME else {}
    for concept in concepts:
        name: str | None
        if squashed:
            name = squashed.get(_squash(concept["slug"]))
        else:
            name = by_code_point.get(code_points(concept["hex"])) or concept["slug"]
            if name not in icons["icons"] and drawing_set != HIGH_CONTRAST:
                name = icons.get("aliases", {}).get(name, {}).get("parent")
        if name is not None and name in icons["icons"]:
            svg = _svg(icons, name)
            if drawing_set == HIGH_CONTRAST:
                svg = svg.replace("currentColor", _INK)
            yield Drawing(concept["hex"], _set_name(drawing_set), name, svg)


def _svg(icons: Mapping[str, Any], name: str) -> str:
    icon = icons["icons"][name]
    width, height = (icon.get(side, icons.get(side, 16)) for side in ("width", "height"))
    box = f"{icon.get('left', 0)} {icon.get('top', 0)} {width} {height}"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{box}" width="{width}" height="{height}">{icon["body"]}</svg>'
    )


def _set_name(drawing_set: str) -> str:
    return "fluent-hc" if drawing_set == HIGH_CONTRAST else drawing_set


def fluent_3d(package: Path, concepts: Sequence[Mapping[str, Any]]) -> Iterator[Drawing]:
    """The renders of @lobehub/fluent-emoji-3d, by code point."""
    files = {code_points(path.stem): path for path in sorted(package.glob("assets/*.webp"))}
    for concept in concepts:
        if path := files.get(code_points(concept["hex"])):
            yield Drawing(concept["hex"], "fluent-3d", path.name, path.read_bytes())


def _squash(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name)


# ---------------------------------------------------------------------- photographs


def photographs(package: Path, concepts: Sequence[Mapping[str, Any]]) -> Iterator[Drawing]:
    """The stamps of :data:`~k3vl.demo.photos.PHOTOS`.

    Args:
        package: the unpacked tuxpaint-stamps-default.
    """
    root = package / "usr" / "share" / "tuxpaint" / "stamps"
    for concept in concepts:
        for name in PHOTOS.get(concept["name"].lower(), ()):
            yield Drawing(concept["hex"], "photos", name, (root / name).read_bytes())


# ---------------------------------------------------------------------- clip art


def clip_art(package: Path, concepts: Sequence[Mapping[str, Any]]) -> Iterator[Drawing]:
    """Openclipart files that state the public domain and are called what they show.

    Args:
        package: the unpacked openclipart-svg.
    """
    root = package / "usr" / "share" / "openclipart" / "svg"
    names = {
        re.sub("[^a-z ]", "", concept["name"].replace("\u2019", "'").lower()): concept
        for concept in concepts
    }
    names.pop("star", None)  # mostly geometry
    for path in sorted(root.rglob("*.svg")):
        place = path.relative_to(root).parts
        if any(place[: len(no)] == no for no in _NO_CLIP_ART):
            continue
        if path.stat().st_size > _MAX_CLIP_ART_BYTES:
            continue
        svg = path.read_text(encoding="utf-8", errors="replace")
        if "PublicDomain" not in svg:
            continue
        title = re.search("<dc:title>([^<]*)</dc:title>", svg)
        called = (_words(title[1]) if title else "", _words(path.stem))
        hit = next((found for words in called if (found := _called(words, names))), None)
        if hit is not None and _in_its_place(place, names[hit]["group"]):
            yield Drawing(names[hit]["hex"], "openclipart", "/".join(place), svg)


def _words(text: str) -> str:
    return " ".join(re.sub("[^a-z ]", " ", text.lower()).split())


def _called(text: str, names: Mapping[str, Any]) -> str | None:
    """The name in a title: all of it, its first words, or its last."""
    if text in names:
        return text
    words = text.split()
    if len(words) <= 4:
        for count in (2, 1):
            if len(words) >= count and (first := " ".join(words[:count])) in names:
                return first
    return words[-1] if words and len(words) <= 3 and words[-1] in names else None


def _in_its_place(place: Sequence[str], group: str) -> bool:
    """An animal among animals or plants; what is among food is food."""
    if group == "animals-nature" and not {"animals", "plants"} & set(place):
        return False
    return "food" not in place or group == "food-drink"


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
