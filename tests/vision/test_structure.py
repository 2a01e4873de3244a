"""Walks over the outer structure of picture files: texts, pages, boxes."""

import struct
import zlib

import pytest
from PIL import Image

from k3vl.vision.limits import DEFAULT_LIMITS
from k3vl.vision.structure import box_ends_early, count_pages, png_without_text
from tests.timing import cpu_limit
from tests.vision.files import encode, png_chunk, raw_png
from tests.vision.test_image import PROCESSOR, error, seen


@pytest.mark.parametrize("kind", [b"tEXt", b"zTXt", b"iTXt", b"iCCP"])
@pytest.mark.parametrize("behind", [False, True])
def test_huge_texts_in_a_png_are_never_unpacked(kind, behind):
    text = bytes(80_000_000)
    heads = {b"tEXt": b"k\0", b"zTXt": b"k\0\0", b"iCCP": b"k\0\0", b"iTXt": b"k\0\1\0\0\0"}
    chunk = png_chunk(kind, heads[kind] + (text if kind == b"tEXt" else zlib.compress(text)))
    plain = raw_png(8, 8, 8, 0, [bytes([7] * 8)] * 8)
    at = len(plain) - 12 if behind else 33
    picture = seen(plain[:at] + chunk + plain[at:])
    assert picture.getpixel((0, 0)) == (7, 7, 7)


def test_cut_text_in_a_png_is_a_cut_file():
    plain = raw_png(8, 8, 8, 0, [bytes(8)] * 8)
    assert error(plain[:33] + png_chunk(b"tEXt", b"k\0" + bytes(100))[:50]) == "image_truncated"


def many_pages(count, order="<"):
    """A TIFF file of ``count`` pages that share one pixel."""
    magic = b"II*\0" if order == "<" else b"MM\0*"
    values = [(256, 1), (257, 1), (258, 8), (259, 1), (262, 1), (273, 8), (278, 1), (279, 1)]
    entries = b"".join(struct.pack(order + "HHII", tag, 4, 1, value) for tag, value in values)
    directory = struct.pack(order + "H", len(values)) + entries
    size = len(directory) + 4
    following = [10 + size * (i + 1) for i in range(count - 1)] + [0]
    pages = b"".join(directory + struct.pack(order + "I", at) for at in following)
    return magic + struct.pack(order + "I", 10) + b"\0\0" + pages


def many_frames(count):
    """A GIF file of ``count`` frames of one pixel."""
    single = encode(Image.new("P", (1, 1)), "GIF")
    start = single.index(b"\x2c")
    return single[:start] + single[start:-1] * count + b";"


@pytest.mark.parametrize("make", [many_pages, many_frames])
@pytest.mark.parametrize(
    ("count", "said"),
    [(1, None), (3, "3 "), (300_000, f"more than {DEFAULT_LIMITS.max_source_frames} ")],
)
def test_pages_are_counted_in_linear_time_up_to_the_limit(make, count, said):
    data = make(count)
    with cpu_limit(5.0):
        remarks = [w for w in PROCESSOR.process(data, "image").warnings if "first used" in w]
    assert [said in w for w in remarks] == ([True] if said else [])


def test_pages_that_go_round_in_a_circle_are_counted_once():
    data = many_pages(3, ">")
    data = data[:-4] + struct.pack(">I", 10)
    assert "3 pages, first used" in PROCESSOR.process(data, "image").warnings


@pytest.mark.parametrize("decoder", ["TIFF", "GIF", "PNG"])
def test_any_bytes_can_be_walked(decoder):
    still = raw_png(1, 1, 8, 0, [b"a"])
    good = {"TIFF": many_pages(3), "GIF": many_frames(3), "PNG": still}[decoder]
    for cut in range(len(good)):
        assert (count_pages(good[:cut], decoder, 10) or 0) <= 3
        assert png_without_text(good[:cut]) == good[:cut]


def test_count_agrees_with_the_decoder():
    frames = [Image.new("RGB", (9, 9), colour) for colour in ("red", "lime", "blue")]
    for fmt in ("GIF", "TIFF"):
        data = encode(frames[0], fmt, save_all=True, append_images=frames[1:])
        assert count_pages(data, fmt, 10) == 3
    big = encode(frames[0], "TIFF", save_all=True, append_images=frames[1:], big_tiff=True)
    assert count_pages(big, "TIFF", 10) == 3


def test_cut_avif_is_called_truncated():
    data = encode(Image.effect_noise((64, 64), 90).convert("RGB"), "AVIF")
    assert not box_ends_early(data)
    assert error(data[: len(data) * 6 // 10]) == "image_truncated"
