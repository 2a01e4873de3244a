"""One normaliser for pictures: recognition, limits, orientation, modes, damage."""

import dataclasses
import io
import json
import random
import resource
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from k3vl.config import K3_MEDIA
from k3vl.errors import MediaError
from k3vl.types import MediaPart
from k3vl.vision.image import load_image
from k3vl.vision.limits import DEFAULT_LIMITS, MediaLimits
from k3vl.vision.processor import MediaProcessor, model_view
from tests.timing import cpu_limit
from tests.vision.files import corners, encode, exif_bytes, png_chunk, raw_png

PROCESSOR = MediaProcessor(K3_MEDIA)


def seen(data, processor=PROCESSOR):
    (picture,) = model_view(processor.process(data, "image"))
    return picture


def error(data, kind="image"):
    with pytest.raises(MediaError) as info:
        PROCESSOR.process(data, kind)
    text = str(info.value)
    assert "0x" not in text
    assert " at " not in text.replace(" at most ", " ")
    assert "object" not in text
    assert "<" not in text
    return info.value.code


# ---------------------------------------------------------------------- orientation


UPRIGHT = {  # where the stored red left bar and green bottom bar end up
    1: ("left", "bottom"),
    2: ("right", "bottom"),
    3: ("right", "top"),
    4: ("left", "top"),
    5: ("top", "right"),
    6: ("top", "left"),
    7: ("bottom", "left"),
    8: ("bottom", "right"),
}
SPOT = {"left": (0.06, 0.5), "right": (0.94, 0.5), "top": (0.5, 0.06), "bottom": (0.5, 0.94)}


def side_of(picture, size, colour):
    for side, (x, y) in SPOT.items():
        pixel = picture.getpixel((int(x * size[0]), int(y * size[1])))
        if all(abs(a - b) < 40 for a, b in zip(pixel, colour, strict=True)):
            return side
    return None


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP", "in-memory"])
def test_all_orientations_are_applied_before_the_size(orientation, order, fmt):  # R1, I1-I3, I5, I6
    exif = exif_bytes(orientation, order)
    picture = corners(640, 480)
    if fmt == "in-memory":
        source = picture
        source.info["exif"] = exif
    else:
        options = {"lossless": True} if fmt == "WEBP" else {"quality": 95} if fmt == "JPEG" else {}
        source = encode(picture, fmt, exif=exif, **options)
    media = PROCESSOR.process(source, "image")
    size = (media.layout.width, media.layout.height)
    assert size == ((640, 480) if orientation < 5 else (480, 640))
    assert media.items[0].grid_thw == ((1, 36, 46) if orientation < 5 else (1, 46, 36))
    (view,) = model_view(media)
    # A red bar that reaches the green one's corner is looked for in the middle of each side.
    assert side_of(view, size, (255, 0, 0)) == UPRIGHT[orientation][0]
    assert side_of(view, size, (0, 255, 0)) == UPRIGHT[orientation][1]
    assert media.warnings == ()


def test_parity_ignores_orientation():
    data = encode(corners(640, 480), "JPEG", exif=exif_bytes(6))
    media = MediaProcessor(K3_MEDIA, parity=True).process(data)
    assert (media.layout.width, media.layout.height) == (640, 480)


@pytest.mark.parametrize(
    "exif",
    [
        b"Exif\0\0garbage!",
        exif_bytes(6)[:18],
        exif_bytes(6, ">")[:12],
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        exif_bytes(9),
        exif_bytes(0, ">"),
    ],
)
def test_malformed_exif_is_reported_and_ignored(exif):  # I4
    picture = corners()
    picture.info["exif"] = exif
    media = PROCESSOR.process(picture)
    assert (media.layout.width, media.layout.height) == (64, 48)
    assert len(media.warnings) == 1
    assert "ignored" in media.warnings[0]


@pytest.mark.filterwarnings("ignore")
def test_malformed_exif_in_a_file_is_reported_and_ignored():
    media = PROCESSOR.process(encode(corners(), "JPEG", exif=exif_bytes(6)[:18]))
    assert media.warnings == ("EXIF data are damaged, orientation ignored",)


def test_orientation_behind_the_pixels_of_a_png_counts():
    data = encode(corners(64, 48))
    end = data.rindex(b"IEND") - 4
    data = data[:end] + png_chunk(b"eXIf", exif_bytes(6)[6:]) + data[end:]
    assert PROCESSOR.process(data).layout.width == 48


def test_tiff_orientation_is_applied_once():
    tags = {274: 6}
    media = PROCESSOR.process(encode(corners(64, 48), "TIFF", tiffinfo=tags))
    assert (media.layout.width, media.layout.height) == (48, 64)
    assert side_of(model_view(media)[0], (48, 64), (255, 0, 0)) == "top"


# ---------------------------------------------------------------------- alpha and palettes


def test_fully_transparent_picture_is_a_chessboard():  # R4, I7
    view = np.asarray(seen(encode(Image.new("RGBA", (56, 56), (0, 0, 0, 0)))))
    i = np.arange(56) // 8
    assert (view[..., 0] == np.where((i[:, None] + i[None, :]) % 2 == 0, 255, 180)).all()


def test_hidden_colour_never_shows_through_the_resize():  # I8
    picture = Image.new("RGBA", (400, 400), (255, 0, 0, 0))
    picture.paste((0, 0, 255, 255), (100, 100, 300, 300))
    small = MediaProcessor(dataclasses.replace(K3_MEDIA, in_patch_limit=64))
    view = np.asarray(seen(encode(picture), small)).astype(int)
    assert (view[..., 0] <= np.maximum(view[..., 1], 180) + 75).all()
    assert not ((view[..., 0] > 200) & (view[..., 1] < 100)).any()


def test_null_background_drops_alpha():  # R6, I9
    config = dataclasses.replace(K3_MEDIA, transparent_bg_config=None)
    view = seen(encode(Image.new("RGBA", (28, 28), (200, 10, 30, 0))), MediaProcessor(config))
    assert view.getpixel((5, 5)) == (200, 10, 30)


@pytest.mark.parametrize(("pattern", "expected"), [("black", 0), ("white", 255)])
def test_plain_backgrounds(pattern, expected):  # I10
    background = dataclasses.replace(K3_MEDIA.transparent_bg_config, pattern=pattern)
    config = dataclasses.replace(K3_MEDIA, transparent_bg_config=background)
    view = seen(encode(Image.new("RGBA", (28, 28), (9, 9, 9, 0))), MediaProcessor(config))
    assert view.getpixel((9, 1)) == (expected,) * 3


def test_palette_with_byte_transparency_is_composited():  # I11
    palette = Image.new("P", (56, 28))
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.paste(1, (28, 0, 56, 28))
    view = seen(encode(palette, transparency=bytes([0, 255])))
    assert view.getpixel((1, 1)) == (255, 255, 255)
    assert view.getpixel((9, 1)) == (180, 180, 180)
    assert view.getpixel((40, 1)) == (0, 0, 255)


def test_equal_indices_with_other_palettes_have_other_digests():  # R8, I13
    digests = set()
    for colours in ([255, 0, 0, 0, 0, 255], [0, 0, 255, 255, 0, 0]):
        picture = Image.new("P", (28, 28))
        picture.putpalette(colours)
        digests.add(PROCESSOR.process(encode(picture)).items[0].digest)
    assert len(digests) == 2
    assert all(len(digest) == 64 for digest in digests)


def test_equal_bytes_in_another_shape_have_another_digest():  # I55
    wide, tall = Image.new("RGB", (150, 30)), Image.new("RGB", (30, 150))
    a, b = PROCESSOR.process(wide).items[0], PROCESSOR.process(tall).items[0]
    assert a.patches.tobytes() == b.patches.tobytes()
    assert a.digest != b.digest


def test_digest_depends_on_settings_and_not_on_the_container():
    picture = corners()
    png, bmp = (PROCESSOR.process(encode(picture, fmt)).items[0].digest for fmt in ("PNG", "BMP"))
    assert png == bmp == PROCESSOR.process(picture).items[0].digest
    other = MediaProcessor(dataclasses.replace(K3_MEDIA, image_mean=(0.4, 0.5, 0.5)))
    assert other.process(picture).items[0].digest != png


GREY_MODES = ["1", "L", "LA", "La", "I", "F", "I;16", "I;16B"]
COLOUR_MODES = ["P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"]


@pytest.mark.parametrize("mode", GREY_MODES + COLOUR_MODES)
def test_every_in_memory_mode_works(mode):  # I6, I14, I49
    if mode in ("PA", "La", "RGBa"):
        picture = Image.new({"PA": "P", "La": "LA", "RGBa": "RGBA"}[mode], (40, 30)).convert(mode)
    else:
        picture = Image.new(mode, (40, 30))
    media = PROCESSOR.process(picture)
    assert media.items[0].patches.shape == (4 * 4, 3, 14, 14)
    assert picture.mode == mode


# ---------------------------------------------------------------------- bit depth


RAMP = (np.arange(256, dtype=np.uint32) * 257).astype(np.uint16).reshape(1, 256).repeat(4, 0)


def ramp_files():
    yield "png", raw_png(256, 4, 16, 0, [row.astype(">u2").tobytes() for row in RAMP])
    little = Image.fromarray(RAMP)
    yield "tiff little", encode(little, "TIFF")
    big = Image.frombytes("I;16B", (256, 4), RAMP.astype(">u2").tobytes())
    yield "tiff big", encode(big, "TIFF")
    yield "pgm", b"P5 256 4 65535\n" + RAMP.astype(">u2").tobytes()
    yield "in memory I", Image.fromarray(RAMP.astype(np.int32))
    yield "in memory F", Image.fromarray((RAMP / np.float32(65535)).astype(np.float32))


@pytest.mark.parametrize("case", list(ramp_files()), ids=lambda case: case[0])
def test_sixteen_bits_keep_256_levels(case):  # R10, I15-I17
    view = np.asarray(seen(case[1]))
    assert view[0, :256, 0].tolist() == list(range(256))


def test_big_endian_tiff_is_what_it_says():
    data = encode(Image.frombytes("I;16B", (256, 4), RAMP.astype(">u2").tobytes()), "TIFF")
    assert data[:4] == b"MM\0*"


def test_sixteen_bit_grey_with_alpha_works():  # I18
    row = b"".join(v.to_bytes(2, "big") + b"\xff\xff" for v in range(0, 65536, 2048))
    view = np.asarray(seen(raw_png(32, 2, 16, 4, [row, row])))
    assert abs(view[0, :32, 0].astype(int) - np.arange(0, 256, 8)).max() <= 1


def test_sixteen_bit_colour_key_becomes_transparent():
    rows = [b"\x12\x34" * 16 + b"\xff\xff" * 16] * 2
    data = raw_png(32, 2, 16, 0, rows, extra=png_chunk(b"tRNS", b"\x12\x34"))
    view = seen(data)
    assert view.getpixel((1, 0)) == (255, 255, 255)
    assert view.getpixel((9, 0)) == (180, 180, 180)


def test_numbers_without_a_known_range_are_stretched_and_said():
    picture = Image.fromarray(np.linspace(-5, 900_000, 28 * 28).reshape(28, 28).astype(np.float32))
    media = PROCESSOR.process(picture)
    assert "scaled to 0-255" in media.warnings[0]
    view = np.asarray(model_view(media)[0])
    assert (view.min(), view.max()) == (0, 255)


# ---------------------------------------------------------------------- CMYK


def cmyk_jpeg(**options):
    rgb = Image.new("RGB", (96, 64), (255, 0, 0))
    ImageDraw.Draw(rgb).rectangle((30, 20, 60, 40), fill="white")
    return encode(rgb.convert("CMYK"), "JPEG", quality=95, **options)


def test_adobe_cmyk_is_red_and_not_cyan():  # R12, I19, I20
    data = cmyk_jpeg()
    assert b"Adobe" in data
    view = seen(data)
    assert np.allclose(view.getpixel((5, 5)), (255, 0, 0), atol=12)
    assert np.allclose(view.getpixel((45, 30)), (255, 255, 255), atol=12)


def test_ycck_is_light_where_it_is_light():  # I20
    """Transform 2 in Adobe's marker: the same samples are luma, chroma and black."""
    inks = Image.merge("CMYK", [Image.new("L", (48, 32), v) for v in (200, 127, 127, 0)])
    data = bytearray(encode(inks, "JPEG", quality=95))
    at = data.index(b"Adobe") + 11
    assert data[at] == 0
    data[at] = 2
    view = seen(bytes(data))
    # Stored luma 55; the samples are Adobe's inverted inks, so the picture is 255 - 55.
    assert np.allclose(view.getpixel((20, 20)), (200, 200, 200), atol=4)


def test_cmyk_without_the_marker_has_a_defined_reading():  # I21
    data = cmyk_jpeg()
    start = data.index(b"\xff\xee")
    length = int.from_bytes(data[start + 2 : start + 4], "big") + 2
    media = PROCESSOR.process(data[:start] + data[start + length :])
    assert media.warnings == ("CMYK JPEG without Adobe's marker, read as Adobe's inverted inks",)


def test_broken_colour_profile_is_ignored():  # I22
    picture = corners()
    with_profile = PROCESSOR.process(encode(picture, icc_profile=b"not a profile" * 20))
    assert with_profile.items[0].digest == PROCESSOR.process(picture).items[0].digest


# ---------------------------------------------------------------------- formats


@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "MPO"])
def test_accepted_formats(fmt):  # I23, I25, I27, I36, I38, I39
    media = PROCESSOR.process(encode(corners(60, 44), fmt))
    assert (media.layout.width, media.layout.height) == (60, 44)
    assert np.allclose(model_view(media)[0].getpixel((5, 10)), (255, 0, 0), atol=40)


def test_names_and_declared_types_are_not_believed(tmp_path):  # I30, I31
    path = tmp_path / "photo.heic"
    path.write_bytes(encode(corners(), "JPEG"))
    assert PROCESSOR.process(path).layout.width == 64
    jpeg_path = tmp_path / "photo.jpg"
    jpeg_path.write_bytes(encode(corners(), "PNG"))
    assert PROCESSOR.process(jpeg_path).layout.width == 64


@pytest.mark.parametrize("fmt", ["GIF", "WEBP", "PNG", "AVIF"])
def test_animated_pictures_give_their_first_frame_and_say_so(fmt):  # I24, I26
    frames = [Image.new("RGB", (56, 28), (250 - 60 * i, 0, 0)) for i in range(4)]
    data = encode(frames[0], fmt, save_all=True, append_images=frames[1:], duration=80)
    media = PROCESSOR.process(data)
    assert media.warnings == ("animated, 4 frames, first used",)
    assert abs(model_view(media)[0].getpixel((3, 3))[0] - 250) < 8


def test_three_page_tiff_gives_page_one_and_says_so():  # R17, I37
    pages = [Image.new("L", (60, 40), 100 * i) for i in range(3)]
    media = PROCESSOR.process(encode(pages[0], "TIFF", save_all=True, append_images=pages[1:]))
    assert media.warnings == ("3 pages, first used",)
    assert model_view(media)[0].getpixel((3, 3)) == (0, 0, 0)


def test_multi_picture_jpeg_gives_its_first_picture():  # I38
    data = encode(corners(), "MPO", save_all=True, append_images=[Image.new("RGB", (64, 48))])
    media = PROCESSOR.process(data)
    assert media.warnings == ("2 pictures, first used",)
    assert model_view(media)[0].getpixel((60, 3))[0] > 240


NOT_IMAGES = [
    (b"", "image_empty"),
    (b"<!DOCTYPE html><html><body>404</body></html>", "not_an_image"),
    (b'{"error": "not found"}', "not_an_image"),
    (json.dumps({"k": "v" * 9000}).encode(), "not_an_image"),
    (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "svg_unsupported"),
    (b"%PDF-1.7\n...", "pdf_unsupported"),
    (b"hello, I am a text file\n", "not_an_image"),
    ("grüße aus köln\n".encode() * 300, "not_an_image"),
    (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "heic_unsupported"),
    (b"\0\0\0\x14ftypmif1\0\0\0\0heic", "heic_unsupported"),
    (b"\0\0\0\x18ftypisom\0\0\0\0isommp42", "video_as_image"),
    (b"\0\0\x01\0\x01\0", "image_unsupported"),
    (b"\xff\x0a\x00\x00", "image_unsupported"),
    (b"ID3\x04\0\0", "not_an_image"),
    (b"\0" * 64, "not_an_image"),
    (b"GIF89a", "image_truncated"),
    (b"\xff\xd8\xff", "image_truncated"),
    (b"\x89PNG\r\n\x1a\n", "image_truncated"),
]


@pytest.mark.parametrize(("data", "code"), NOT_IMAGES)  # I28, I29, I33-I35, I40
def test_what_is_no_picture_is_named(data, code):
    found = error(data)
    assert found == code or (data == b"GIF89a" and found == "image_corrupt")


def test_messages_say_what_the_data_look_like():  # I34
    for data, word in ((b"<html>", "HTML"), (b'{"a": 1}', "JSON"), (b"plain words", "text")):
        with pytest.raises(MediaError, match=word):
            PROCESSOR.process(data)


def test_random_bytes_never_leak_an_address(tmp_path):  # R22, I54
    generator = random.Random(7)
    heads = [b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM\0\0\0\0\0\0\0\0", b"II*\0",
             b"MM\0*", b"P6 9 9 255\n", b"RIFF\x40\0\0\0WEBPVP8X"]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(600):
            data = heads[number % len(heads)] + generator.randbytes(generator.randint(1, 300))
            try:
                PROCESSOR.process(data)
            except MediaError as exc:
                assert "0x" not in str(exc)  # noqa: PT017
                assert "object" not in str(exc)  # noqa: PT017


# ---------------------------------------------------------------------- damage and limits


@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP", "BMP", "PPM", "GIF"])
def test_cut_files_are_called_truncated(fmt):  # R13, I32
    noise = Image.frombytes("RGB", (200, 160), random.Random(1).randbytes(200 * 160 * 3))
    whole = encode(noise, fmt)
    assert error(whole[: len(whole) * 6 // 10]) == "image_truncated"
    assert PROCESSOR.process(whole).layout.width == 200


def test_huge_png_is_refused_from_its_header():  # R18, I42
    rows = (b"\0" * 5000,)  # one bit a pixel; the header alone must be enough
    data = raw_png(40_000, 40_000, 1, 0, rows * 3) + b"\0" * 5_000_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with cpu_limit(1.0):
        assert error(data) == "image_too_large"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024


@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF"])
def test_the_pixel_cap_is_ours_and_configurable(fmt):  # I41, I43
    data = encode(Image.new("L" if fmt != "WEBP" else "RGB", (300, 200)), fmt)
    small = MediaProcessor(K3_MEDIA, limits=MediaLimits(max_image_pixels=59_999))
    with pytest.raises(MediaError, match="at most 59999") as info:
        small.process(data)
    assert info.value.code == "image_too_large"
    exact = MediaProcessor(K3_MEDIA, limits=MediaLimits(max_image_pixels=60_000))
    assert exact.process(data).layout.width == 300


def test_panorama_over_pillows_own_limit_is_decoded(monkeypatch):  # I43
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    data = encode(Image.new("1", (600, 300)))
    assert PROCESSOR.process(data).layout.width == 600
    assert Image.MAX_IMAGE_PIXELS == 1000
    with pytest.raises(MediaError):
        MediaProcessor(K3_MEDIA, limits=MediaLimits(max_image_pixels=999)).process(data)


def test_in_memory_pictures_have_the_same_cap():
    small = MediaProcessor(K3_MEDIA, limits=MediaLimits(max_image_pixels=10))
    with pytest.raises(MediaError, match="5 x 5 is 25 pixels"):
        small.process(Image.new("RGB", (5, 5)))


def test_huge_jpeg_is_reduced_while_decoding_without_changing_the_plan(monkeypatch):  # I41, I52
    monkeypatch.setattr("k3vl.vision.image._DRAFT_PIXELS", 10_000)
    config = dataclasses.replace(K3_MEDIA, in_patch_limit=64)
    data = encode(corners(1200, 900), "JPEG", quality=95, exif=exif_bytes(6))
    sizes = []

    def plan_size(width, height):
        sizes.append((width, height))
        return 129, 97

    reduced = load_image(data, DEFAULT_LIMITS, plan_size=plan_size)
    assert sizes == [(1200, 900)]
    assert (reduced.width, reduced.height) == (900, 1200)
    assert reduced.image.size == (225, 300)
    media = MediaProcessor(config).process(data)
    monkeypatch.undo()
    whole = MediaProcessor(config).process(data)
    assert media.layout == whole.layout
    assert media.items[0].grid_thw == whole.items[0].grid_thw
    difference = np.abs(media.items[0].patches.astype(int) - whole.items[0].patches)
    assert difference.mean() < 2


@pytest.mark.parametrize(
    "size", [(1, 1), (2, 2), (10, 13), (27, 257), (1, 10_000), (10_000, 1), (2270, 10)]
)
def test_odd_sizes_work(size):  # I44-I48, I51, I56
    media = PROCESSOR.process(encode(Image.new("RGB", size, (9, 99, 199))))
    assert (media.layout.width, media.layout.height) == size
    assert media.items[0].num_tokens >= 1
    assert model_view(media)[0].getpixel((0, 0)) == (9, 99, 199)
    small = "very small picture, {} x {} pixels".format(*size)
    assert (small in media.warnings) == (min(size) < 14)


def test_padding_is_black_on_the_right_and_at_the_bottom():
    view = np.asarray(seen(Image.new("RGB", (30, 20), "white")))
    assert view.shape == (28, 56, 3)
    assert (view[:20, :30] == 255).all()
    assert view[20:].max() == 0
    assert view[:, 30:].max() == 0


def test_the_callers_picture_is_not_changed():
    picture = corners()
    picture.info["exif"] = exif_bytes(6)
    before = picture.tobytes()
    PROCESSOR.process(MediaPart("image", picture))
    assert (picture.size, picture.tobytes()) == ((64, 48), before)


def test_opened_pictures_are_read_through_the_same_path(tmp_path):  # I6
    path = tmp_path / "a.jpg"
    path.write_bytes(encode(corners(640, 480), "JPEG", exif=exif_bytes(6)))
    with Image.open(path) as opened:
        from_image = PROCESSOR.process(opened)
    assert from_image.items[0].digest == PROCESSOR.process(path).items[0].digest
    assert from_image.layout.width == 480


def test_cut_file_that_someone_else_opened_is_an_error_too():
    data = encode(Image.effect_noise((200, 200), 90), "JPEG")
    assert error(Image.open(io.BytesIO(data[: len(data) // 2]))) == "image_truncated"


def test_golden_pictures_give_the_same_digest_twice():
    folder = Path(__file__).resolve().parents[1] / "golden" / "images"
    paths = sorted(folder.iterdir())
    assert len(paths) > 20
    for path in paths:
        first, second = (PROCESSOR.process(path).items[0].digest for _ in range(2))
        assert first == second


# ---------------------------------------------------------------------- what a file may cost


def test_recognition_takes_no_time_on_comments_without_end():
    with cpu_limit(1.0):
        assert error(b"P6 " + b"# " * 2000 + b"x") == "not_an_image"


def test_netpbm_comments_are_skipped():
    assert seen(b"P5 # one\n# two\r2 2 255\n" + bytes([9] * 4)).getpixel((1, 1)) == (9, 9, 9)


def test_sixteen_bits_are_scaled_in_bands(monkeypatch):
    values = np.arange(500 * 400, dtype=np.uint16).reshape(500, 400)
    sizes = []
    monkeypatch.setattr(np, "rint", lambda wide: sizes.append(wide.size) or wide.round())
    loaded = load_image(Image.fromarray(values), DEFAULT_LIMITS)
    assert np.array_equal(np.asarray(loaded.image), np.rint(values * (255 / 65535)))
    assert max(sizes[:4]) <= 128 * 400
