"""Files as they are met in the wild, sent over HTTP: each has its answer, and harms nobody else.

The names are those of the faults; what the pixels become is tested in ``tests/vision``.
"""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
from PIL import Image

from tests.app.serving import Process, ask, data_url, image_part, post
from tests.vision.files import (
    corners,
    encode,
    exif_bytes,
    noise,
    png_chunk,
    raw_png,
    solid_frames,
    video,
)
from tests.vision.test_video import (
    add_audio,
    animation,
    cover_file,
    damaged,
    detailed_frames,
    intra_clip,
    packet_positions,
    rotated,
    variable,
    with_streams,
)

SMALL = (64, 48)
NOISE = noise((300, 300), 50)
DEEP = np.linspace(0, 65535, 64 * 48).astype(np.uint16).reshape(48, 64)


def sideways(value: int, fmt: str = "JPEG") -> bytes:
    return encode(corners(), fmt, exif=exif_bytes(value))


def alpha() -> Image.Image:
    image = corners().convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(SMALL))
    return image


def palette_with_alpha() -> bytes:
    return encode(corners().quantize(8), "PNG", transparency=bytes([0, 128] + [255] * 6))


def declared(width: int, height: int) -> bytes:
    return raw_png(width, height, 8, 2, [b""])


def pages(fmt: str, count: int = 3, **options) -> bytes:
    images = [Image.new("RGB", SMALL, (60 * i, 9, 9)) for i in range(count)]
    return encode(images[0], fmt, save_all=True, append_images=images[1:], **options)


def grey_alpha_16() -> bytes:
    return raw_png(64, 48, 16, 4, [b"\x80\0\xff\xff" * 64] * 48)


HEIC = b"\0\0\0\x18ftyp{brand}\0\0\0\0mif1heic" + b"\0" * 40
# (fault, file, answer): an upright size and how many warnings at least, or an error's code.
PICTURES = [
    *[(f"I1-I3 orientation {n}", sideways(n), (SMALL, 0)) for n in (2, 3, 4)],
    *[(f"I1-I3 orientation {n}", sideways(n), (SMALL[::-1], 0)) for n in (5, 6, 7, 8)],
    ("I4 malformed EXIF", encode(corners(), "JPEG", exif=b"Exif\0\0MM\0*\0\0"), (SMALL, 1)),
    ("I7 nothing but transparent", encode(Image.new("RGBA", SMALL), "PNG"), (SMALL, 0)),
    ("I8 half transparent", encode(alpha(), "PNG"), (SMALL, 0)),
    ("I11 palette with alpha", palette_with_alpha(), (SMALL, 0)),
    ("I12 palette", encode(corners().quantize(8), "PNG"), (SMALL, 0)),
    ("I14 grey with alpha", encode(alpha().convert("LA"), "PNG"), (SMALL, 0)),
    ("I14 one bit", encode(corners().convert("1"), "PNG"), (SMALL, 0)),
    ("I15 16 bit PNG", encode(Image.fromarray(DEEP), "PNG"), (SMALL, 0)),
    ("I17 16 bit TIFF", encode(Image.fromarray(DEEP), "TIFF"), (SMALL, 0)),
    ("I18 16 bit grey with alpha", grey_alpha_16(), (SMALL, 0)),
    ("I19 CMYK", encode(corners().convert("CMYK"), "JPEG"), (SMALL, 0)),
    ("I22 broken profile", encode(corners(), "JPEG", icc_profile=b"no profile"), (SMALL, 0)),
    ("I23 WebP", encode(corners(), "WEBP"), (SMALL, 0)),
    ("I24 animated GIF", pages("GIF"), (SMALL, 1)),
    ("I25 GIF of one frame", encode(corners(), "GIF"), (SMALL, 0)),
    ("I26 animated WebP", pages("WEBP"), (SMALL, 1)),
    ("I26 animated PNG", pages("PNG"), (SMALL, 1)),
    ("I27 AVIF", encode(corners(), "AVIF"), (SMALL, 0)),
    ("I28 HEIC", HEIC.replace(b"{brand}", b"heic"), "heic_unsupported"),
    ("I29 HEIC by another brand", HEIC.replace(b"{brand}", b"mif1"), "heic_unsupported"),
    ("I32 cut JPEG", encode(NOISE, "JPEG")[:9000], "image_truncated"),
    ("I32 cut PNG", encode(NOISE, "PNG")[:9000], "image_truncated"),
    ("I32 cut WebP", encode(NOISE, "WEBP")[:2000], "image_truncated"),
    ("I33 nothing", b"", "image_empty"),
    ("I34 a web page", b"<!DOCTYPE html><p>404", "not_an_image"),
    ("I34 JSON", b'{"error": "not found"}', "not_an_image"),
    ("I35 SVG", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg_unsupported"),
    ("I36 TIFF", encode(corners(), "TIFF"), (SMALL, 0)),
    ("I37 TIFF of three pages", pages("TIFF"), (SMALL, 1)),
    ("I38 MPO", pages("MPO", 2), (SMALL, 1)),
    ("I39 PGM", encode(corners().convert("L"), "PPM"), (SMALL, 0)),
    ("I39 Windows icon", b"\0\0\1\0\1\0" + b"\0" * 40, "image_unsupported"),
    ("I40 PDF", b"%PDF-1.7\n1 0 obj", "pdf_unsupported"),
    ("I42 declares 20000x20000", declared(20_000, 20_000), "image_too_large"),
    ("I42 declares 2^31 squared", declared(2**31 - 1, 2**31 - 1), "image_too_large"),
    ("I44 a line", encode(Image.new("RGB", (1, 10_000)), "PNG"), ((1, 10_000), 1)),
    ("I44 a line down", encode(Image.new("RGB", (10_000, 1)), "PNG"), ((10_000, 1), 1)),
    ("I45 a pixel", encode(Image.new("RGB", (1, 1)), "PNG"), ((1, 1), 1)),
    ("I45 four pixels", encode(Image.new("RGB", (2, 2)), "PNG"), ((2, 2), 1)),
    ("I46 27x257", encode(Image.new("RGB", (27, 257)), "PNG"), ((27, 257), 0)),
    ("I47 227 to 1", encode(Image.new("RGB", (4540, 20)), "PNG"), ((4540, 20), 0)),
    ("I50 448x449", encode(Image.new("RGB", (448, 449)), "PNG"), ((448, 449), 0)),
    ("I51 a tall screenshot", encode(Image.new("RGB", (900, 8000)), "PNG"), ((900, 8000), 0)),
    ("I54 random bytes", bytes(range(7, 250)), "not_an_image"),
    ("I56 10x13", encode(Image.new("RGB", (10, 13)), "PNG"), ((10, 13), 1)),
    ("a text chunk that inflates", raw_png(
        64, 48, 8, 2, [bytes(192)] * 48, png_chunk(b"zTXt", b"a\0\0" + b"x" * 99)
    ), (SMALL, 0)),
    ("a clip as a picture", video(solid_frames(2)), "video_as_image"),
]  # fmt: skip


def audio_alone() -> bytes:
    def build(container) -> None:
        stream, frames = add_audio(container)
        container.mux(stream.encode(frames[0]))
        container.mux(stream.encode())

    return with_streams(build)


def recorder() -> bytes:
    out = io.BytesIO()
    out.seekable = lambda: False  # type: ignore[method-assign]
    with av.open(out, "w", format="webm", options={"live": "1"}) as container:
        stream = container.add_stream("libvpx", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for pixels in solid_frames(8):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


def hdr(stream) -> None:
    stream.codec_context.color_trc, stream.codec_context.colorspace = 18, 9
    stream.codec_context.color_primaries = 9


def aspect(stream) -> None:
    stream.codec_context.sample_aspect_ratio = 2


def tail_lost() -> bytes:
    return damaged(intra_clip(), packet_positions(intra_clip())[16:])


def middle_lost() -> bytes:
    return damaged(intra_clip(), packet_positions(intra_clip())[8:11])


def late(data: bytes) -> bytes:
    return data[len(data) // 4 // 188 * 188 + 77 :]


STREAM = video(detailed_frames(24), fmt="mpegts", rate=8, options={"g": "8"})
CLIPS = [
    ("V1 turned", rotated(90), ((64, 96), 0)),
    ("R32 V1 turned the other way", rotated(-90), ((64, 96), 0)),
    ("V2 upside down", rotated(180), ((96, 64), 0)),
    ("V3 mirrored", rotated(0, hflip=True), ((96, 64), 0)),
    ("V4 variable rate", variable([*range(0, 100, 10), 500, 1000, 1500]), (SMALL, 0)),
    ("V8-V10 joined late", late(STREAM), ((128, 96), 0)),
    ("V12 a slide show", variable([0, 4000, 9000]), (SMALL, 0)),
    ("V13 V16 no duration", recorder(), (SMALL, 0)),
    ("V14 V18 cut", STREAM[: len(STREAM) // 2], ((128, 96), 0)),
    ("V17 broken in the middle", middle_lost(), ((128, 96), 2)),
    ("V18 broken tail", tail_lost(), ((128, 96), 1)),
    ("R36 V19 0.3 seconds", video(solid_frames(3), rate=10), (SMALL, 0)),
    ("R36 V20 one frame", video(solid_frames(1)), (SMALL, 0)),
    ("V23 HDR", video(
        solid_frames(2, 176, 144), codec="libx265", pix_fmt="yuv420p10le", setup=hdr
    ), ((176, 144), 1)),
    ("V24 full range 4:4:4", video(solid_frames(3), pix_fmt="yuv444p"), (SMALL, 0)),
    ("V25 10 bit", video(solid_frames(3), pix_fmt="yuv420p10le"), (SMALL, 0)),
    ("V26 no decoder", video(solid_frames(3)).replace(b"avc1", b"evc1").replace(b"avcC", b"evcC"),
     "video_codec_unsupported"),
    ("V27 alpha", video(
        solid_frames(3), fmt="webm", codec="libvpx-vp9", pix_fmt="yuva420p"
    ), (SMALL, 0)),
    ("V29 odd size", video(solid_frames(3, 65, 49), pix_fmt="yuv444p"), ((65, 49), 0)),
    ("V30 oblong pixels", video(solid_frames(3), setup=aspect), ((128, 48), 0)),
    ("V31 interlaced", video(
        detailed_frames(4), options={"x264-params": "interlaced=1"}
    ), ((128, 96), 1)),
    ("V32 cover art alone", cover_file(with_clip=False), "no_video_stream"),
    ("V33 cover art first", cover_file(with_clip=True), (SMALL, 0)),
    ("V34 sound alone", audio_alone(), "no_video_stream"),
    ("V34 no stream", b"\0\0\0\x18ftypisom\0\0\0\0isommp42", "video_corrupt"),
    ("V34 nothing", b"", "video_empty"),
    ("V34 a playlist", b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "not_a_video"),
    ("V44 GIF", animation("GIF", [200, 0, 300]), ((56, 28), 0)),
    ("V45 another size", video(solid_frames(4), fmt="mpegts", rate=8)
     + video(solid_frames(4, 96, 96), fmt="mpegts", rate=8), (SMALL, 1)),
    ("a picture as a clip", encode(corners(), "PNG"), "image_as_video"),
]  # fmt: skip


@pytest.fixture(scope="module")
def server():
    process = Process()
    yield process
    assert process.stop() == 0
    assert "Traceback" not in "\n".join(process.lines)


def check(server: Process, part: dict, answer) -> None:
    reply = post(server.url, ask("x", part, max_tokens=1))
    if isinstance(answer, str):
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, answer), error["message"]
        assert error["param"] == "messages[0].content[1]"
        assert error["message"].startswith("messages[0].content[1]: ")
        assert "0x" not in error["message"]
        assert " object at " not in error["message"]
    else:
        size, least_warnings = answer
        assert reply.status_code == 200, reply.text
        (media,) = post(server.url, ask("x", part), "/v1/tokenize").json()["media"]
        assert (media["width"], media["height"]) == size
        warnings = reply.json()["k3vl"]["warnings"]
        assert len(warnings) >= least_warnings
        assert bool(warnings) == bool(least_warnings), warnings
        details = reply.json()["usage"]["prompt_tokens_details"]
        assert details["image_tokens"] + details["video_tokens"] == media["tokens"] > 0
    fine = post(server.url, ask(image_part(encode(corners(), "PNG")), max_tokens=1))
    assert fine.status_code == 200


@pytest.mark.parametrize(
    ("data", "answer"), [p[1:] for p in PICTURES], ids=[p[0] for p in PICTURES]
)
def test_pictures(server, data: bytes, answer) -> None:
    check(server, image_part(data), answer)


@pytest.mark.parametrize(("data", "answer"), [c[1:] for c in CLIPS], ids=[c[0] for c in CLIPS])
def test_clips(server, data: bytes, answer) -> None:
    url = data_url(data, "video/mp4")
    check(server, {"type": "video_url", "video_url": {"url": url}}, answer)
