"""Builds the atlas: fetches the packages that hold the drawings, draws them, packs them in sheets.

::

    pip install 'k3vl[train]'
    python -m k3vl.demo.build_atlas --out atlas

``npm pack``, ``apt-get download`` and ``dpkg-deb`` are used as they are set up; nothing is
installed. This is the only part of the demo model that uses the network. ``sources.json`` in the
atlas says which versions it was made of. OpenMoji and EmojiOne (CC-BY-SA-4.0) and photographs of
Tux Paint go into sheets of their own, for measuring only.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from k3vl.demo import icons, sources
from k3vl.demo.atlas import CELL
from k3vl.demo.packages import CLIP_ART, EMOJI, FONTS, ICONS, STAMPS, SYMBOLA
from k3vl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from k3vl.demo.sources import Drawing

_INNER = 92  # the drawing's longer side in its 96-pixel cell
_DRAWN = 160
_VISIBLE = 16
_GRID = 16
_VIEW_BOX = re.compile(r'viewBox="\s*[-\d.e]+[ ,]+[-\d.e]+[ ,]+([-\d.e]+)[ ,]+([-\d.e]+)')


# ---------------------------------------------------------------------- packages


def fetch(folder: Path) -> dict[str, str]:
    """Bring all packages into a folder, unpacked; returns their versions.

    Raises:
        ConfigError: a client is missing or fails; what it said went to standard error.
    """
    versions = {}
    for name, version in {**EMOJI, **ICONS}.items():
        target = folder / name
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            packed = _run(["npm", "pack", "--silent", f"{name}@{version}"], folder).split()[-1]
            _unpack(folder / packed, target)
            (folder / packed).unlink()
        versions[name] = version
    for name in (CLIP_ART, SYMBOLA, STAMPS, *FONTS):
        if not list(folder.glob(f"{name}_*.deb")):
            _run(["apt-get", "download", name], folder)
        archive = next(folder.glob(f"{name}_*.deb"))
        _run(["dpkg-deb", "-x", archive.name, name], folder)
        versions[name] = _run(["dpkg-deb", "-f", archive.name, "Version"], folder).strip()
    return versions


def _run(command: list[str], folder: Path) -> str:
    try:
        return subprocess.run(  # noqa: S603 - fixed commands on packages named above
            command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
        ).stdout
    except FileNotFoundError as exc:
        raise ConfigError(f"{command[0]} is missing") from exc
    except subprocess.CalledProcessError as exc:
        raise ConfigError(f"{' '.join(command)}: exit code {exc.returncode}") from exc


def _unpack(archive: Path, target: Path) -> None:
    """An npm archive; everything in it lies below ``package/``."""
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    with tarfile.open(archive) as tar:
        tar.extractall(part, filter="data")
    (part / "package").rename(target)
    part.rmdir()


def known_drawings(folder: Path) -> list[Drawing]:
    """What is trained on; drawings of one colour come last, in the order of the names."""
    concepts = sources.read_concepts(folder / "emojibase-data")
    iconify = folder / "@iconify-json"
    found: list[Drawing] = []
    for name in (*sources.BY_CODE_POINT, *sources.BY_NAME):
        found += sources.icon_set(iconify / name, concepts, name)
    found += sources.fluent_3d(folder / "@lobehub" / "fluent-emoji-3d", concepts)
    found += sources.clip_art(folder / CLIP_ART, concepts)
    found.sort(key=lambda d: (d.hex, d.drawing_set, d.source))
    last = sources.icon_set(iconify / sources.HIGH_CONTRAST, concepts, sources.HIGH_CONTRAST)
    return [*found, *last]


def unseen_drawings(folder: Path, drawing_set: str) -> list[Drawing]:
    """One set of the evaluation."""
    concepts = sources.read_concepts(folder / "emojibase-data")
    found = sources.icon_set(folder / "@iconify-json" / drawing_set, concepts, drawing_set)
    return sorted(found, key=lambda d: d.hex)


# ---------------------------------------------------------------------- pixels


def draw(drawing: Drawing) -> bytes | None:
    """RGBA of a cell; None for what cannot be drawn or shows nothing."""
    if isinstance(drawing.data, bytes):
        image = Image.open(io.BytesIO(drawing.data))
    else:
        import resvg_py

        box = _VIEW_BOX.search(drawing.data)
        tall = box is not None and float(box[2]) > float(box[1])
        width, height = (None, _DRAWN) if tall else (_DRAWN, None)
        try:
            png = resvg_py.svg_to_bytes(
                svg_string=drawing.data, width=width, height=height, skip_system_fonts=True
            )
        except BaseException as exc:
            # What its authors did not foresee arrives as a Rust panic, which is no Exception.
            if type(exc).__name__ not in ("ValueError", "PanicException"):
                raise
            return None
        image = Image.open(io.BytesIO(bytes(png)))
    cell = fit(image.convert("RGBA"))
    return None if cell is None else cell.tobytes()


def fit(image: Image.Image) -> Image.Image | None:
    """The visible part of an RGBA picture, centred in a cell."""
    box = image.getchannel("A").point(lambda v: 255 if v > _VISIBLE else 0).getbbox()
    if box is None:
        return None
    image = image.crop(box)
    scale = _INNER / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    cell = Image.new("RGBA", (CELL, CELL))
    cell.paste(
        image.resize(size, Image.Resampling.LANCZOS),
        ((CELL - size[0]) // 2, (CELL - size[1]) // 2),
    )
    return cell


def write_sheets(folder: Path, stem: str, drawings: Iterable[Drawing], processes: int) -> int:
    """Draw and pack ``stem-000.webp``, ... with the list ``stem.json``; how many failed."""
    drawings = list(drawings)
    with get_context("spawn").Pool(processes) as pool:
        cells = pool.map(draw, drawings, chunksize=16)
    drawn = [(d, cell) for d, cell in zip(drawings, cells, strict=True) if cell is not None]
    rows = []
    per_sheet = _GRID * _GRID
    for first in range(0, len(drawn), per_sheet):
        part = drawn[first : first + per_sheet]
        sheet = np.zeros((_GRID, _GRID, CELL, CELL, 4), np.uint8)
        name = f"{stem}-{first // per_sheet:03d}.webp"
        for i, (drawing, cell) in enumerate(part):
            row, column = divmod(i, _GRID)
            sheet[row, column] = np.frombuffer(cell, np.uint8).reshape(CELL, CELL, 4)
            rows.append(
                {
                    "sheet": name,
                    "row": row,
                    "col": column,
                    "hex": drawing.hex,
                    "set": drawing.drawing_set,
                    "source": drawing.source,
                }
            )
        pixels = sheet.transpose(0, 2, 1, 3, 4).reshape(_GRID * CELL, _GRID * CELL, 4)
        Image.fromarray(pixels).save(folder / name, quality=90, method=4)
    (folder / f"{stem}.json").write_text(json.dumps(rows), encoding="utf-8")
    return len(drawings) - len(drawn)


# ---------------------------------------------------------------------- the command


@dataclass(frozen=True, slots=True)
class _Sheets:
    stem: str
    drawings: list[Drawing]


def build(packages: Path, out: Path, versions: dict[str, str], processes: int) -> dict[str, int]:
    """Make the atlas of fetched packages; how many drawings of each list could not be drawn."""
    out.mkdir(parents=True)
    concepts = sources.read_concepts(packages / "emojibase-data")
    (out / "concepts.json").write_text(json.dumps(concepts), encoding="utf-8")
    (out / "sources.json").write_text(json.dumps(versions, indent=1) + "\n", encoding="utf-8")
    lists = [_Sheets("train", known_drawings(packages))]
    lists += [_Sheets(f"unseen-{name}", unseen_drawings(packages, name)) for name in sources.UNSEEN]
    photos = sorted(sources.photographs(packages / STAMPS, concepts), key=lambda d: d.hex)
    lists.append(_Sheets("unseen-photos", photos))
    failed = {s.stem: write_sheets(out, s.stem, s.drawings, processes) for s in lists}
    _copy_fonts(packages, out / "fonts")
    symbola = _file(packages / SYMBOLA, "Symbola_hint.ttf")
    icons.build(out, packages, symbola)
    return failed


def _copy_fonts(packages: Path, out: Path) -> None:
    out.mkdir()
    for package, names in FONTS.items():
        for name in names:
            shutil.copyfile(_file(packages / package, name), out / name)


def _file(package: Path, name: str) -> Path:
    found = next(package.rglob(name), None)
    if found is None:
        raise ConfigError(f"{package.name}: holds no {name}")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m k3vl.demo.build_atlas", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="a new folder for the atlas")
    parser.add_argument("--packages", type=Path, help="where packages are kept; default: in --out")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args(arguments)
    packages = args.packages or args.out.with_name(f"{args.out.name}-packages")
    packages.mkdir(parents=True, exist_ok=True)
    failed = build(packages, args.out, fetch(packages), args.processes)
    for stem, count in failed.items():
        print(f"{stem}: {count} files could not be drawn", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main()
