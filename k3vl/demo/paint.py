"""Scenes to picture files and clips on the CPU, for examples and the evaluation.

The same geometry and sampling as the training composer (``compose``), by Pillow instead of a
kernel, and without appearance noise. Files are ordinary PNG, JPEG, MP4 and GIF.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageOps

from k3vl.demo.atlas import CELL, COLOUR_RGB
from k3vl.demo.shapes import shape_masks
from k3vl.demo.words import STRIP_HEIGHT, STRIP_WIDTH

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from k3vl.demo.atlas import Atlas
    from k3vl.demo.scene import Colour, Item, Scene, Strip
    from k3vl.demo.words import Printer

# As in the composer: small pictures are drawn at twice their size and averaged.
_FINE_BELOW = 112
_BILINEAR = Image.Resampling.BILINEAR


class Painter:
    """Draws scenes of one atlas.

    Args:
        atlas: the drawings.
        printer: renders text strips.
        seed: of blurred-noise grounds.
    """

    def __init__(self, atlas: Atlas, printer: Printer, seed: int = 0) -> None:
        self._atlas = atlas
        self._printer = printer
        self._noise = np.random.default_rng(seed)
        self._sheets: dict[str, Image.Image] = {}

    def picture(self, scene: Scene, width: int, height: int) -> Image.Image:
        """The first frame; RGBA where the scene has no ground, else RGB."""
        return self.frames(scene, width, height)[0]

    def frames(self, scene: Scene, width: int, height: int) -> list[Image.Image]:
        """All frames of a clip, on one ground."""
        fine = 2 if max(width, height) <= _FINE_BELOW else 1
        size = (width * fine, height * fine)
        ground = self._ground(scene, *size)
        strip = self._printer.strip(scene.strip.text) if scene.strip else None
        out = []
        for frame in range(scene.frames):
            canvas = ground.copy()
            for index, item in enumerate(scene.items):
                x, y, there = scene.at(index, frame)
                if there:
                    centre = (x * size[0], y * size[1])
                    layer = _placed(self._sprite(item), size, centre, item.size * min(size), item)
                    canvas.alpha_composite(layer)
            if strip is not None and scene.strip is not None:
                canvas.alpha_composite(_strip_layer(strip, scene.strip, size))
            if fine > 1:
                canvas = canvas.reduce(fine)
            out.append(canvas if scene.ground.kind == 3 else canvas.convert("RGB"))
        return out

    # ------------------------------------------------------------------ parts

    def _sprite(self, item: Item) -> Image.Image:
        """The drawing with a transparent margin, tinted where the scene says so."""
        first_shape = len(self._atlas.sprites)
        if item.sprite >= first_shape:
            alpha = Image.fromarray(self._shapes[item.sprite - first_shape])
            image = Image.new("RGBA", (CELL, CELL), (255, 255, 255, 0))
            image.putalpha(alpha)
        else:
            sprite = self._atlas.sprites[item.sprite]
            if sprite.sheet not in self._sheets:
                with Image.open(self._atlas.folder / sprite.sheet) as sheet:
                    self._sheets[sprite.sheet] = sheet.convert("RGBA")
            left, top = sprite.column * CELL, sprite.row * CELL
            image = self._sheets[sprite.sheet].crop((left, top, left + CELL, top + CELL))
        if item.tint is not None:
            flat = Image.new("RGBA", image.size, _bytes(item.tint))
            flat.putalpha(image.getchannel("A"))
            image = flat
        return ImageOps.expand(image, 1, (0, 0, 0, 0))

    @cached_property
    def _shapes(self) -> NDArray[np.uint8]:
        return (shape_masks() * 255).round().astype(np.uint8)

    def _ground(self, scene: Scene, width: int, height: int) -> Image.Image:
        ground = scene.ground
        if ground.kind == 3:
            return Image.new("RGBA", (width, height), (0, 0, 0, 0))
        first = np.array(ground.first)
        pixels = np.broadcast_to(first, (height, width, 3))
        if ground.kind == 1:
            y = np.linspace(-0.5, 0.5, height)[:, None]
            x = np.linspace(-0.5, 0.5, width)[None]
            along = x * math.cos(ground.angle) + y * math.sin(ground.angle) + 0.5
            share = (along.clip(0, 1) * 0.6)[..., None]
            pixels = first * (1 - share) + np.array(ground.second) * share
        elif ground.kind == 2:
            coarse = self._noise.random((3, 7, 7), dtype=np.float32)
            cloud = [Image.fromarray(c).resize((width, height), _BILINEAR) for c in coarse]
            pixels = first * 0.7 + np.stack([np.asarray(c) for c in cloud], -1) * 0.3
        image = Image.fromarray((pixels.clip(0, 1) * 255).round().astype(np.uint8))
        return image.convert("RGBA")


def _bytes(colour: Colour | NDArray[np.float32]) -> tuple[int, int, int]:
    r, g, b = (round(float(c) * 255) for c in colour)
    return r, g, b


def _placed(
    image: Image.Image,
    size: tuple[int, int],
    centre: tuple[float, float],
    extent: float,
    item: Item,
) -> Image.Image:
    """``image`` (a sprite with its margin) on an empty canvas of ``size``."""
    scale = CELL / extent
    c, s = math.cos(item.angle) * scale, math.sin(item.angle) * scale
    x, y = centre
    middle = CELL / 2 + 1
    matrix = (
        c * item.flip,
        s * item.flip,
        middle - (c * x + s * y) * item.flip,
        -s,
        c,
        middle + s * x - c * y,
    )
    return image.transform(size, Image.Transform.AFFINE, matrix, _BILINEAR)


def _strip_layer(alpha: NDArray[np.uint8], strip: Strip, size: tuple[int, int]) -> Image.Image:
    """The printed text, on its card if it has one, on an empty canvas."""
    width, height = strip.width * size[0], strip.height * min(size)
    x, y = strip.x * size[0], strip.y * size[1]
    c, s = math.cos(strip.angle), math.sin(strip.angle)
    across, down = STRIP_WIDTH / width, STRIP_HEIGHT / height
    matrix = (
        c * across,
        s * across,
        STRIP_WIDTH / 2 - (c * x + s * y) * across,
        -s * down,
        c * down,
        STRIP_HEIGHT / 2 + (s * x - c * y) * down,
    )

    def drawn(mask: NDArray[np.uint8], colour: int) -> Image.Image:
        layer = Image.new("RGBA", size, _bytes(COLOUR_RGB[colour]))
        turned = Image.fromarray(mask).transform(size, Image.Transform.AFFINE, matrix, _BILINEAR)
        layer.putalpha(turned)
        return layer

    ink = drawn(alpha, strip.ink)
    if strip.card < 0:
        return ink
    card = drawn(np.full_like(alpha, 255), strip.card)
    card.alpha_composite(ink)
    return card


def save_clip(
    frames: Sequence[Image.Image], path: Path, rate: Fraction | int, *, repeat: int = 1
) -> None:
    """Write frames as an H.264 file without audio.

    Args:
        frames: RGB pictures of one size; odd sides are padded by their last row or column, which
            H.264 needs.
        path: ending in ``.mp4``.
        rate: frames a second of the file.
        repeat: how often every frame is shown.
    """
    import av

    width, height = (side + side % 2 for side in frames[0].size)
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=Fraction(rate))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"crf": "14", "preset": "veryfast"}
        for frame in frames:
            pixels = np.asarray(frame.convert("RGB"))
            pad = ((0, height - pixels.shape[0]), (0, width - pixels.shape[1]), (0, 0))
            pixels = np.pad(pixels, pad, mode="edge")
            for _ in range(repeat):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
