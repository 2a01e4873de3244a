"""A folder of all that goes wrong with pictures: each fault is one item's, each odd file is right.

The echo model's captions are digests of the pixels that it was shown, so two files with one picture
have one caption, however they are stored.
"""

from __future__ import annotations

import json
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from k3vl.app import caption as caption_module
from k3vl.config import K3_MEDIA
from k3vl.vision.processor import MediaProcessor
from tests.app.captioning_kit import run, use_echo
from tests.app.test_cli import bomb
from tests.vision.files import corners, encode, exif_bytes, noise, raw_png

if TYPE_CHECKING:
    from k3vl.pipeline import Pipeline

UPRIGHT = corners()
HEAD = b"\0\0\0\x18ftyp"
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
"""How a camera stores an upright picture under each EXIF orientation."""


def rgba(alpha: int) -> Image.Image:
    image = UPRIGHT.convert("RGBA")
    image.putalpha(alpha)
    return image


def ramp(dtype: str) -> bytes:
    return np.linspace(0, 65535, 64 * 48).astype(dtype).tobytes()


def grey16(*, with_alpha: bool = False) -> bytes:
    values = np.frombuffer(ramp(">u2"), ">u2").reshape(48, 64)
    rows = np.stack([values, np.full_like(values, 65535)], axis=-1) if with_alpha else values
    return raw_png(64, 48, 16, 4 if with_alpha else 0, [row.tobytes() for row in rows])


def sixteen_bit_tiff(order: str) -> bytes:
    mode = "I;16" if order == "<" else "I;16B"
    return encode(Image.frombytes(mode, (64, 48), ramp(f"{order}u2")), "TIFF")


def palette(colours: list[int]) -> bytes:
    image = Image.new("P", (40, 30))
    image.putdata([n % 2 for n in range(1200)])
    image.putpalette(colours)
    return encode(image)


def pages(fmt: str, **options: object) -> bytes:
    first, *rest = [Image.new("RGB", (40, 30), (90 * n, 0, 77)) for n in range(3)]
    return encode(first, fmt, save_all=True, append_images=rest, **options)


def ycck() -> bytes:
    """Transform 2 in Adobe's marker: the same samples are luma, chroma and black."""
    inks = Image.merge("CMYK", [Image.new("L", (48, 32), v) for v in (200, 127, 127, 0)])
    data = bytearray(encode(inks, "JPEG", quality=95))
    data[data.index(b"Adobe") + 11] = 2
    return bytes(data)


@cache
def huge_page() -> bytes:
    """As many pixels as a page at 1,400 dots an inch; below the cap, reduced while decoding."""
    return encode(Image.new("L", (12_000, 12_000), 200), "JPEG")


@cache
def panorama() -> bytes:
    """A picture that somebody really has: over Pillow's own limit, below ours."""
    return encode(Image.new("1", (20_992, 10_496)))


def good_files() -> dict[str, bytes]:
    plain = encode(UPRIGHT)
    files = {
        f"turned{n}.png": encode(UPRIGHT.transpose(t), exif=exif_bytes(n)) for n, t in TURNS.items()
    }
    files |= {
        "upright.png": plain,
        "big-endian-exif.png": encode(UPRIGHT.transpose(TURNS[6]), exif=exif_bytes(6, ">")),
        "broken-exif.jpg": encode(UPRIGHT, "JPEG", exif=exif_bytes(6)[:18]),
        "clear.png": encode(rgba(0)),
        "half.png": encode(rgba(128)),
        "opaque.png": encode(rgba(255)),
        "palette-red.png": palette([255, 0, 0, 0, 0, 255]),
        "palette-blue.png": palette([0, 0, 255, 255, 0, 0]),
        "palette-clear.png": encode(UPRIGHT.quantize(8), transparency=b"\x80" * 8),
        "grey16.png": grey16(),
        "grey16-alpha.png": grey16(with_alpha=True),
        "grey16-little.tif": sixteen_bit_tiff("<"),
        "grey16-big.tif": sixteen_bit_tiff(">"),
        "bilevel.tif": encode(UPRIGHT.convert("1"), "TIFF"),
        "cmyk.jpg": encode(UPRIGHT.convert("CMYK"), "JPEG"),
        "ycck.jpg": ycck(),
        "huge-page.jpg": huge_page(),
        "panorama.png": panorama(),
        "wrong-profile.jpg": encode(UPRIGHT, "JPEG", icc_profile=b"not a profile"),
        "web.webp": encode(UPRIGHT, "WEBP", lossless=True),
        "new.avif": encode(UPRIGHT, "AVIF"),
        "grey.pgm": encode(UPRIGHT.convert("L"), "PPM"),
        "old.bmp": encode(UPRIGHT, "BMP"),
        "one.gif": encode(UPRIGHT, "GIF"),
        "moves.gif": pages("GIF", duration=100),
        "moves.webp": pages("WEBP", duration=100),
        "moves.png": pages("PNG", duration=100),
        "pages.tif": pages("TIFF"),
        "several.mpo": pages("MPO"),
        "really-png.jpg": plain,
        "really-jpeg.heic": encode(UPRIGHT, "JPEG"),
        "dot.png": encode(Image.new("RGB", (1, 1))),
        "four.png": encode(Image.new("RGB", (2, 2))),
        "small.png": encode(Image.new("RGB", (10, 13))),
        "below-a-patch.png": encode(Image.new("RGB", (27, 257))),
        "line.png": encode(Image.new("RGB", (1, 3000))),
        "row.png": encode(Image.new("RGB", (3000, 1))),
        "wide.png": encode(Image.new("RGB", (2270, 10))),
        "off-the-grid.png": encode(Image.new("RGB", (448, 449))),
        "tall-page.png": encode(Image.new("RGB", (600, 8000))),
        "flat.png": encode(Image.new("RGB", (30, 150), "red")),
        "flat-too.png": encode(Image.new("RGB", (150, 30), "red")),
    }
    return files


def bad_files() -> dict[str, tuple[bytes, str]]:
    grain = noise((300, 300), 50)
    jpeg, png = encode(grain, "JPEG"), encode(grain)
    return {
        "bomb.png": (bomb(), "image_too_large"),
        "cut.jpg": (jpeg[: len(jpeg) * 6 // 10], "image_truncated"),
        "cut.png": (png[: len(png) // 2], "image_truncated"),
        "empty.png": (b"", "image_empty"),
        "html.jpg": (b"<!doctype html><html><body>404</body></html>", "not_an_image"),
        "json.png": (b'{"error": "not found"}', "not_an_image"),
        "lfs.png": (b"version https://git-lfs.github.com/spec/v1\noid 0\n", "not_an_image"),
        "paper.png": (b"%PDF-1.7\n", "pdf_unsupported"),
        "drawing.jpg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg_unsupported"),
        "phone.heic": (HEAD + b"heic\0\0\0\0mif1heic" + bytes(64), "heic_unsupported"),
        "phone.jpg": (HEAD + b"mif1\0\0\0\0mif1heic" + bytes(64), "heic_unsupported"),
        "random.webp": (bytes(range(256)), "not_an_image"),
        "clip.mp4": (HEAD + b"isom" + bytes(100), "video_corrupt"),
    }


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("in")
    for name, data in good_files().items():
        (folder / name).write_bytes(data)
    for name, (data, _) in bad_files().items():
        (folder / name).write_bytes(data)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")  # as the command does
        use_echo(patch)
        echo = caption_module.Pipeline.load

        def load(name: str, **settings: Any) -> Pipeline:
            pipeline = echo(name, **settings)
            pipeline.processor = MediaProcessor(K3_MEDIA, limits=settings["limits"])
            return pipeline

        patch.setattr(caption_module.Pipeline, "load", load)
        result = run(folder, "--json", "--output", folder / "out.jsonl")
    assert result.exit_code == 2
    found = [json.loads(line) for line in result.stdout.splitlines()]
    return {Path(row["path"]).name: row for row in found}


def test_every_file_has_its_row(rows: dict[str, dict]) -> None:
    assert {name for name, row in rows.items() if "caption" in row} == set(good_files())
    assert rows.keys() == good_files().keys() | bad_files().keys()


@pytest.mark.parametrize("name", bad_files())
def test_a_fault_is_named_and_says_nothing_of_the_machine(name: str, rows: dict[str, dict]) -> None:
    row = rows[name]
    assert (row["error_class"], row["code"]) == ("media", bad_files()[name][1])
    assert "0x" not in row["error"]
    assert "object at" not in row["error"]


@pytest.mark.parametrize("name", [f"turned{n}.png" for n in TURNS] + ["big-endian-exif.png"])
def test_pictures_are_upright(name: str, rows: dict[str, dict]) -> None:
    assert rows[name]["caption"] == rows["upright.png"]["caption"]
    assert (rows[name]["width"], rows[name]["height"]) == UPRIGHT.size


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("opaque.png", "upright.png"),
        ("really-png.jpg", "upright.png"),
        ("web.webp", "upright.png"),
        ("old.bmp", "upright.png"),
        ("broken-exif.jpg", "really-jpeg.heic"),
        ("wrong-profile.jpg", "really-jpeg.heic"),
        ("grey16-little.tif", "grey16.png"),
        ("grey16-big.tif", "grey16.png"),
    ],
)
def test_one_picture_has_one_caption_however_it_is_stored(
    name: str, same: str, rows: dict[str, dict]
) -> None:
    assert rows[name]["caption"] == rows[same]["caption"]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("palette-red.png", "palette-blue.png"),
        ("flat.png", "flat-too.png"),
        ("clear.png", "upright.png"),
        ("half.png", "clear.png"),
        ("palette-clear.png", "upright.png"),
    ],
)
def test_other_pictures_have_other_captions(name: str, other: str, rows: dict[str, dict]) -> None:
    assert rows[name]["caption"] != rows[other]["caption"]


@pytest.mark.parametrize("name", ["moves.gif", "moves.webp", "moves.png", "pages.tif"])
def test_what_is_left_out_is_told(name: str, rows: dict[str, dict]) -> None:
    assert any("first used" in warning for warning in rows[name]["warnings"])


def test_repairs_and_doubts_are_told(rows: dict[str, dict]) -> None:
    for name in ("broken-exif.jpg", "dot.png", "small.png"):
        assert rows[name]["warnings"], name
    assert not rows["upright.png"]["warnings"]
    assert all(rows[name]["usage"]["image_tokens"] > 0 for name in good_files())
