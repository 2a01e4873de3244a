"""A small atlas of drawn blobs, so that no test needs the real drawings."""

import io
import json

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from k3vl.demo.atlas import CELL, load_atlas

NAMES = (
    "kite",
    "owl",
    "goggles",
    "mouse face",
    "bowl with spoon",
    "popcorn",
    "green apple",
    "fox",
    "tokyo tower",
    "bus",
    "knife",
    "cherries",
    "house",
    "unicorn",
    "wolf",
    "lemon",
)
SETS = ("noto", "twemoji", "fluent-emoji-flat", "fluent-hc", "openclipart")


def _sheet(seed, count):
    rng = np.random.default_rng(seed)
    sheet = Image.new("RGBA", (CELL * 16, CELL * 16), (0, 0, 0, 0))
    draw = ImageDraw.Draw(sheet)
    for i in range(count):
        x, y = i % 16 * CELL, i // 16 * CELL
        colour = tuple(int(c) for c in rng.integers(0, 256, 3))
        box = (x + 8, y + 8, x + 8 + int(rng.integers(40, 80)), y + 8 + int(rng.integers(40, 80)))
        (draw.ellipse if i % 2 else draw.rectangle)(box, fill=(*colour, 255))
    return sheet


def _rows(prefix, sets):
    cells = [(name, kind) for name in range(len(NAMES)) for kind in sets]
    return [
        {
            "sheet": f"{prefix}-000.webp",
            "row": i // 16,
            "col": i % 16,
            "hex": f"1F{name:03X}",
            "set": kind,
            "source": kind,
        }
        for i, (name, kind) in enumerate(cells)
    ]


@pytest.fixture(scope="session")
def atlas_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("atlas")
    concepts = [
        {"hex": f"1F{i:03X}", "name": name, "sub": f"group-{i % 3}"} for i, name in enumerate(NAMES)
    ]
    (folder / "concepts.json").write_text(json.dumps(concepts))
    for prefix, sets in (("train", SETS), ("unseen-openmoji", ("openmoji",))):
        rows = _rows(prefix, sets)
        (folder / f"{prefix}.json").write_text(json.dumps(rows))
        _sheet(len(sets), len(rows)).save(folder / f"{prefix}-000.webp", lossless=True)
    (folder / "fonts").mkdir()
    font = ImageFont.load_default(28).path
    assert isinstance(font, io.BytesIO)
    for name in ("Plain", "DejaVuSerifCondensed-Italic"):
        (folder / "fonts" / f"{name}.ttf").write_bytes(font.getvalue())
    return folder


@pytest.fixture(scope="session")
def atlas(atlas_folder):
    return load_atlas(atlas_folder)
