"""More drawings for training: line icons of Iconify sets and two monochrome emoji fonts.

The drawing sets of the atlas are mostly coloured; what stays unseen is how people draw with a pen.
These sets add line art and silhouettes by other hands. ``build_atlas`` writes them into
``more-icons.json`` and its sheets. Every drawing is stored twice where it has an inside: as ink
alone, to be tinted, and as black ink on white paper.
"""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from k3vl.demo.atlas import CELL, INK_SUFFIX, is_held, load_atlas
from k3vl.demo.sources import slug

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

ICON_SETS = (
    "game-icons",
    "healthicons",
    "hugeicons",
    "icon-park",
    "icon-park-outline",
    "iconoir",
    "lucide",
    "material-symbols",
    "mdi",
    "mingcute",
    "ph",
    "tabler",
    "temaki",
)
# The plain name first; at most two drawings of a set are taken, of which one is filled.
_LINE = ("", "-outline", "-01", "-line", "-light", "-outline-rounded", "-variant", "-stroke")
_FILLED = ("-fill", "-filled", "-rounded", "-solid", "-duotone", "-02")
# Icon sets mean something else by these words.
OTHER_SENSE = frozenset(
    {
        "bank",
        "bubbles",
        "cricket",
        "crutch",
        "drum",
        "fly",
        "fog",
        "hook",
        "ice",
        "label",
        "link",
        "mate",
        "memo",
        "metro",
        "mouse",
        "pick",
        "pie",
        "pin",
        "rat",
        "ring",
        "satellite",
        "seal",
        "speaker",
        "star",
        "station",
        "thread",
        "train",
        "turkey",
        "wheel",
        "window",
        "wood",
    }
)
_INNER = 92
_SIDE = 16  # sprites in a row of a sheet


def icons_of(table: dict[str, Any], name: str) -> list[str]:
    """Icon names of a set that show ``name``: one in line, one filled."""
    known = table["icons"].keys() | table.get("aliases", {}).keys()
    found = []
    for suffixes in (_LINE, _FILLED):
        own = [slug(name) + suffix for suffix in suffixes if slug(name) + suffix in known]
        found += own[:1]
    return found


def svg(table: dict[str, Any], icon: str) -> str:
    """The icon as a document, in black."""
    entry = table["icons"].get(icon) or table["icons"].get(table["aliases"][icon]["parent"])
    if entry is None:
        return ""
    width = entry.get("width", table.get("width", 16))
    height = entry.get("height", table.get("height", 16))
    body = entry["body"].replace("currentColor", "#000")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
    return f'{head} width="{width}" height="{height}" color="#000">{body}</svg>'


def fit(alpha: Image.Image) -> Image.Image | None:
    """Ink trimmed and centred in a cell; None where there is none."""
    box = alpha.point(lambda v: 255 if v > 16 else 0).getbbox()
    if box is None:
        return None
    alpha = alpha.crop(box)
    scale = _INNER / max(alpha.size)
    width, height = (max(1, round(side * scale)) for side in alpha.size)
    cell = Image.new("L", (CELL, CELL))
    alpha = alpha.resize((width, height), Image.Resampling.LANCZOS)
    cell.paste(alpha, ((CELL - width) // 2, (CELL - height) // 2))
    return cell


def on_paper(ink: Image.Image) -> Image.Image | None:
    """Black ink with everything that it encloses in white; None where it encloses little."""
    room = Image.new("L", (CELL + 2, CELL + 2))
    room.paste(ink.point(lambda v: 255 if v > 60 else 0), (1, 1))
    ImageDraw.floodfill(room, (0, 0), 128)
    inside = np.asarray(room.crop((1, 1, CELL + 1, CELL + 1))) == 0
    if inside.mean() < 0.04:
        return None
    alpha = np.maximum(np.asarray(ink), inside * np.uint8(255))
    dark = np.where(inside, 255 - np.asarray(ink), 0)
    return Image.fromarray(np.stack([dark, dark, dark, alpha], -1).astype(np.uint8), "RGBA")


def _icons(folder: Path, names: Sequence[str]) -> Iterator[tuple[int, str, str, Image.Image]]:
    """Name index, set, icon, ink."""
    import resvg_py

    for kind in ICON_SETS:
        table = json.loads((folder / "@iconify-json" / kind / "icons.json").read_text("utf-8"))
        for index, name in enumerate(names):
            if name in OTHER_SENSE:
                continue
            for icon in icons_of(table, name):
                text = svg(table, icon)
                if not text:
                    continue
                data = bytes(
                    resvg_py.svg_to_bytes(svg_string=text, width=160, skip_system_fonts=True)
                )
                with Image.open(io.BytesIO(data)) as image:
                    yield index, kind, icon, image.convert("RGBA").getchannel("A")


def _glyphs(
    fonts: Sequence[Path], kind: str, code_points: Sequence[str]
) -> Iterator[tuple[int, str, str, Image.Image]]:
    """Name index, set, code point, ink; a glyph that the font lacks looks like its box."""
    faces = [ImageFont.truetype(str(path), 160) for path in fonts]
    missing = [_drawn(face, "\U0010fffe").tobytes() for face in faces]
    for index, points in enumerate(code_points):
        numbers = [int(p, 16) for p in points.split("-") if p not in ("", "FE0F")]
        if len(numbers) != 1:
            continue
        for face, box in zip(faces, missing, strict=True):
            ink = _drawn(face, chr(numbers[0]))
            if ink.getbbox() and ink.tobytes() != box:
                yield index, kind, points, ink
                break


def _drawn(face: ImageFont.FreeTypeFont, text: str) -> Image.Image:
    image = Image.new("L", (320, 320))
    ImageDraw.Draw(image).text((40, 40), text, fill=255, font=face)
    return image


def build(atlas_folder: Path, npm: Path, symbola: Path) -> int:
    """Write ``more-icons.json`` and its sheets; the number of drawings."""
    atlas = load_atlas(atlas_folder)
    concepts = json.loads((atlas_folder / "concepts.json").read_text("utf-8"))
    rows = json.loads((atlas_folder / "train.json").read_text("utf-8"))
    code_points = sorted({row["hex"] for row in rows})
    assert {c["hex"] for c in concepts} >= set(code_points), "names of all drawings are known"
    # The monochrome font has the designs of the coloured one, whose held-out cells stay unseen.
    allowed = ["" if is_held(p, "noto") or is_held(p, "noto-v1") else p for p in code_points]
    files = npm / "@fontsource" / "noto-emoji" / "files"
    emoji = sorted(files.glob("noto-emoji-[0-9]*-400-normal.woff2"))
    sources = [
        *_glyphs([symbola], "symbola", code_points),
        *_glyphs(emoji, "noto-emoji", allowed),
        *_icons(npm, atlas.names),
    ]
    pictures: list[Image.Image] = []
    lines: list[dict[str, Any]] = []
    for index, kind, source, alpha in sources:
        if (ink := fit(alpha)) is None:
            continue
        black = Image.new("RGBA", ink.size)
        black.putalpha(ink)
        versions = [(f"{kind}{INK_SUFFIX}", black), (kind, on_paper(ink))]
        for name, picture in versions:
            if picture is not None:
                sheet, cell = divmod(len(pictures), _SIDE**2)
                row, column = divmod(cell, _SIDE)
                place = {"sheet": f"more-icons-{sheet:03d}.webp", "row": row, "col": column}
                lines.append(place | {"hex": code_points[index], "set": name, "source": source})
                pictures.append(picture)
    for start in range(0, len(pictures), _SIDE**2):
        canvas = Image.new("RGBA", (CELL * _SIDE, CELL * _SIDE))
        for cell, picture in enumerate(pictures[start : start + _SIDE**2]):
            canvas.paste(picture, (cell % _SIDE * CELL, cell // _SIDE * CELL))
        name = f"more-icons-{start // _SIDE**2:03d}.webp"
        canvas.save(atlas_folder / name, quality=70, alpha_quality=40, method=4)
    (atlas_folder / "more-icons.json").write_text(json.dumps(lines), encoding="utf-8")
    return len(pictures)
