"""The atlas from packages: small stand-ins for the packages, real drawing and packing."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from k3vl.demo import build_atlas, sources
from k3vl.demo.atlas import CELL
from k3vl.demo.build_atlas import draw, fit, write_sheets
from k3vl.demo.sources import Drawing

SQUARE = '<path fill="red" d="M2 2h12v12H2z"/>'
ENTRIES = [
    ("1F98A", "fox", 1, 10),
    ("1FA81", "kite", 2, 20),
    ("1F004", "mahjong red dragon", 2, 20),
    ("2615", "cup of “hot” café", 2, 20),
    ("1F550", "one o\u2019clock", 2, 20),
    ("1F600", "grinning face", 0, 0),
]


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")

    def write(path, content):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))

    base = folder / "emojibase-data" / "en"
    keys = ("smileys-emotion", "animals-nature", "activities")
    groups = [{"order": i, "key": key} for i, key in enumerate(keys)]
    subgroups = [{"order": 10 * i, "key": f"sub-{i}"} for i in range(3)]
    write(base / "messages.json", {"groups": groups, "subgroups": subgroups})
    entries = [
        {"hexcode": point, "label": name, "group": group, "subgroup": sub, "emoji": "x"}
        for point, name, group, sub in ENTRIES
    ]
    write(base / "data.json", [*entries, {"hexcode": "1F1E6", "label": "regional A", "emoji": "x"}])

    icons = {name: {"body": SQUARE} for name in ("fox-face", "kite", "cupofhotcafe", "dragon")}
    icons["kite"] |= {"width": 20, "left": 1}
    aliases = {"mahjong-red-dragon": {"parent": "dragon"}}
    table = {"icons": icons, "aliases": aliases, "width": 16, "height": 16}
    write(folder / "set" / "icons.json", table)
    write(folder / "set" / "chars.json", {"1f98a": "fox-face"})
    ink = {"icons": {"kite": {"body": '<path fill="currentColor" d="M1 1h9v9z"/>'}}}
    write(folder / "ink" / "icons.json", ink)

    art = folder / "art" / "usr" / "share" / "openclipart" / "svg"
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">{{}}{SQUARE}</svg>'
    free = svg.format("<a>PublicDomain</a><dc:title>{}</dc:title>")
    write(art / "animals" / "x1.svg", free.format("Red Fox"))
    write(art / "animals" / "fox_2.svg", free.format("animal"))
    write(art / "animals" / "owned.svg", svg.format("<dc:title>fox</dc:title>"))
    write(art / "toys" / "a_fox.svg", free.format("fox"))
    write(art / "toys" / "kite.svg", free.format(""))
    write(art / "food" / "kite.svg", free.format("kite"))
    write(art / "computer" / "kite.svg", free.format("kite"))
    return folder


@pytest.fixture(scope="module")
def concepts(packages):
    return sources.read_concepts(packages / "emojibase-data")


def test_faces_clocks_and_parts_are_no_concepts(concepts):
    found = [(c["hex"], c["slug"], c["group"], c["sub"]) for c in concepts]
    assert found == [
        ("1F98A", "fox", "animals-nature", "sub-1"),
        ("1FA81", "kite", "activities", "sub-2"),
        ("1F004", "mahjong-red-dragon", "activities", "sub-2"),
        ("2615", "cup-of-hot-cafe", "activities", "sub-2"),
    ]


def test_icons_are_found_by_code_point_then_name_then_alias(packages, concepts):
    found = {d.hex: d.source for d in sources.icon_set(packages / "set", concepts, "noto")}
    assert found == {"1F98A": "fox-face", "1FA81": "kite", "1F004": "dragon"}


def test_sets_without_code_points_are_matched_by_squashed_names(packages, concepts):
    found = {d.hex: d.source for d in sources.icon_set(packages / "set", concepts, "fxemoji")}
    assert found == {"1FA81": "kite", "2615": "cupofhotcafe"}


def test_one_colour_sets_are_inked(packages, concepts):
    (kite,) = sources.icon_set(packages / "ink", concepts, sources.HIGH_CONTRAST)
    assert kite.drawing_set == "fluent-hc"
    assert "currentColor" not in kite.data


def test_clip_art_is_free_and_in_its_place(packages, concepts):
    found = [(d.hex, d.source) for d in sources.clip_art(packages / "art", concepts)]
    assert found == [
        ("1F98A", "animals/fox_2.svg"),
        ("1F98A", "animals/x1.svg"),
        ("1FA81", "toys/kite.svg"),
    ]


def test_a_drawing_fills_its_cell_and_is_centred():
    image = Image.new("RGBA", (300, 300))
    image.paste((0, 0, 255, 255), (10, 20, 110, 70))
    cell = fit(image)
    assert cell is not None
    assert cell.size == (CELL, CELL)
    left, top, right, bottom = cell.getchannel("A").point(lambda v: 255 * (v > 16)).getbbox()
    assert (left, right) == (2, 94)
    assert top == CELL - bottom == 25
    assert fit(Image.new("RGBA", (30, 30))) is None


def test_what_cannot_be_drawn_is_left_out_and_counted(tmp_path):
    png = io.BytesIO()
    Image.new("RGB", (40, 20), "green").save(png, "PNG")
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 10 10">'
    good = f'{head}<rect width="9" height="9"/></svg>'
    drawings = [
        Drawing("1F98A", "noto", "fox", good),
        Drawing("1F98A", "noto", "empty", good.replace("rect", "g")),
        Drawing("1F98A", "noto", "broken", "<svg"),
        Drawing("1FA81", "fluent-3d", "kite.png", png.getvalue()),
    ]
    assert write_sheets(tmp_path, "train", drawings, 1) == 2
    rows = json.loads((tmp_path / "train.json").read_text())
    assert [(r["source"], r["row"], r["col"]) for r in rows] == [("fox", 0, 0), ("kite.png", 0, 1)]
    with Image.open(tmp_path / "train-000.webp") as sheet:
        assert sheet.size == (16 * CELL, 16 * CELL)
        second = np.asarray(sheet.crop((CELL, 0, 2 * CELL, CELL)))
    assert second[CELL // 2, CELL // 2, 1] > 100
    assert draw(drawings[2]) is None


def test_missing_client_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build_atlas.ConfigError, match="npm is missing"):
        build_atlas.fetch(tmp_path)
