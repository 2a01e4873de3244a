"""Odd media files, made on the spot."""

import io
import struct
import zlib

import av
import numpy as np
from PIL import Image, ImageDraw


def encode(image, fmt="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, fmt, **options)
    return buffer.getvalue()


def exif_bytes(orientation, order="<"):
    head = b"II*\0" if order == "<" else b"MM\0*"
    entry = struct.pack(order + "HHI", 0x0112, 3, 1) + struct.pack(order + "HH", orientation, 0)
    return (
        b"Exif\0\0" + head + struct.pack(order + "IH", 8, 1) + entry + struct.pack(order + "I", 0)
    )


def noise(size, spread=80, seed=0):
    """Grey noise, the same in every run: Pillow's own is drawn by a generator that others use."""
    drawn = np.random.default_rng(seed).normal(128, spread, (size[1], size[0]))
    return Image.fromarray(drawn.clip(0, 255).astype(np.uint8))


def corners(width=64, height=48):
    """Red left bar, green bottom bar, on white."""
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, width // 4 - 1, height), fill=(255, 0, 0))
    draw.rectangle((0, height - height // 4, width, height), fill=(0, 255, 0))
    return image


def png_chunk(name, data):
    crc = zlib.crc32(name + data)
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", crc)


def raw_png(width, height, depth, colour_type, rows, extra=b""):
    """A PNG of any bit depth; ``rows`` are bytes without filter marks."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row for row in rows))
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + extra
        + png_chunk(b"IDAT", body)
        + png_chunk(b"IEND", b"")
    )


def solid_frames(count, width=64, height=48):
    """Frames whose grey level tells their number: 10, 20, 30, ... (up to 24 frames)."""
    return [np.full((height, width, 3), 10 + 10 * i, np.uint8) for i in range(count)]


def video(
    frames,
    *,
    fmt="mp4",
    codec="libx264",
    rate=25,
    pix_fmt="yuv420p",
    times=None,
    setup=None,
    options=None,
    time_base=None,
    audio=False,
):
    """Encode RGB frames; ``times`` in ticks of ``time_base`` make the rate variable."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=fmt) as container:
        stream = container.add_stream(codec, rate=rate, options=options or {})
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pix_fmt
        if time_base is not None:
            stream.codec_context.time_base = time_base
        if setup:
            setup(stream)
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times is not None:
                frame.pts = times[number]
                frame.time_base = time_base
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return buffer.getvalue()


def level(picture, x=10, y=10):
    """Grey level of a solid frame."""
    return sum(picture.getpixel((x, y))) / 3
