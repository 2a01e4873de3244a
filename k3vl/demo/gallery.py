"""The pictures and the clip in ``examples/``: hand-made scenes with known captions.

``python -m k3vl.demo.gallery --atlas FOLDER --out examples`` makes them again. Only drawings that
may be passed on with a notice are used: Noto Emoji (Apache-2.0) and Fluent Emoji (MIT).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from k3vl.demo.atlas import COLOUR_NAMES, COLOUR_RGB, SHAPES, Atlas, load_atlas
from k3vl.demo.paint import Painter, save_clip
from k3vl.demo.scene import CHESSBOARD, Event, Ground, Item, Scene, Strip
from k3vl.demo.words import Printer, find_fonts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3vl.demo.scene import Colour

NOTO, FLAT, SOFT = "noto", "fluent-emoji-flat", "fluent-3d"
_EXIF_ORIENTATION = 0x0112
_ROTATED = 6  # turn 90 degrees clockwise to see it upright
_PAPER = Ground(kind=0, first=(0.97, 0.96, 0.92), second=(0.0, 0.0, 0.0), angle=0.0)
_SKY = Ground(kind=1, first=(0.80, 0.90, 1.0), second=(0.55, 0.70, 0.95), angle=1.57)
_MEADOW = Ground(kind=1, first=(0.90, 0.97, 0.85), second=(0.60, 0.80, 0.55), angle=1.57)
_NOTHING = Ground(kind=3, first=CHESSBOARD[0], second=CHESSBOARD[1], angle=0.0)


@dataclass(frozen=True, slots=True)
class Thing:
    """A drawing, by name and set, or a shape with a colour in place of the set."""

    name: str
    source: str
    x: float
    y: float
    size: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One file of the gallery.

    Attributes:
        prompt: question whose answer is ``expected``.
        rotated: stored on its side, with an EXIF orientation that puts it upright.
    """

    file: str
    size: tuple[int, int]
    things: tuple[Thing, ...]
    expected: str
    prompt: str = "Describe the image."
    ground: Ground = _PAPER
    text: str = ""
    event: Event | None = None
    rotated: bool = False


EXAMPLES = (
    Example(
        file="fox-kite-bus.png",
        size=(448, 336),
        ground=_MEADOW,
        things=(
            Thing("fox", FLAT, 0.20, 0.66, 0.50),
            Thing("kite", NOTO, 0.50, 0.28, 0.46),
            Thing("bus", SOFT, 0.80, 0.66, 0.50),
        ),
        expected="A fox, a kite and a bus.",
    ),
    Example(
        file="three-strawberries.jpg",
        size=(224, 224),
        things=(
            Thing("strawberry", NOTO, 0.22, 0.28, 0.38),
            Thing("strawberry", FLAT, 0.74, 0.30, 0.38),
            Thing("strawberry", SOFT, 0.48, 0.74, 0.40),
        ),
        prompt="How many strawberries are there?",
        expected="Three.",
    ),
    Example(
        file="owl-transparent.png",
        size=(180, 180),
        ground=_NOTHING,
        things=(Thing("owl", NOTO, 0.5, 0.5, 0.9),),
        prompt="What is this?",
        expected="An owl.",
    ),
    Example(
        file="guitar-sideways.jpg",
        size=(168, 224),
        things=(Thing("guitar", SOFT, 0.5, 0.5, 0.9),),
        prompt="Name the object.",
        expected="A guitar.",
        rotated=True,
    ),
    Example(
        file="wide-locomotive-helicopter.png",
        size=(336, 140),
        ground=_SKY,
        things=(
            Thing("locomotive", NOTO, 0.22, 0.55, 0.75),
            Thing("helicopter", FLAT, 0.76, 0.45, 0.75),
        ),
        expected="A locomotive and a helicopter.",
    ),
    Example(
        file="tall-rocket-above-turtle.png",
        size=(168, 280),
        ground=_SKY,
        things=(
            Thing("rocket", SOFT, 0.5, 0.26, 0.72),
            Thing("turtle", NOTO, 0.5, 0.77, 0.66),
        ),
        prompt="Where is the rocket relative to the turtle?",
        expected="The rocket is above the turtle.",
    ),
    Example(
        file="sign.jpg",
        size=(224, 224),
        things=(Thing("pineapple", FLAT, 0.5, 0.62, 0.62),),
        text="K3V7",
        prompt="Read the text.",
        expected="K3V7",
    ),
    Example(
        file="shapes.png",
        size=(224, 168),
        things=(
            Thing("circle", "red", 0.25, 0.5, 0.55),
            Thing("star", "blue", 0.74, 0.5, 0.6),
        ),
        expected="A red circle and a blue star.",
    ),
)

CLIP = Example(
    file="sailboat.mp4",
    size=(112, 112),
    ground=_SKY,
    things=(Thing("sailboat", NOTO, 0.5, 0.55, 0.42),),
    event=Event(kind="right", path=(0.23, 0.77)),
    prompt="What happens in the video?",
    expected="A sailboat moves from left to right.",
)
_CLIP_FRAMES, _CLIP_RATE = 8, 4  # two seconds; the shipped configuration looks at every other one


def scene_of(example: Example, atlas: Atlas, frames: int = 1) -> Scene:
    """The example as a scene.

    Raises:
        KeyError: the atlas lacks a drawing.
    """
    sprites = {
        (atlas.names[s.name], s.drawing_set): i for i, s in reversed(list(enumerate(atlas.sprites)))
    }
    items = []
    for thing in example.things:
        place = {"name": thing.name, "x": thing.x, "y": thing.y, "size": thing.size}
        if thing.source in COLOUR_NAMES:
            kind = SHAPES.index(thing.name)
            items.append(
                Item(
                    label=len(atlas.names) + kind,
                    sprite=len(atlas.sprites) + kind,
                    tint=_colour(thing.source),
                    colour=thing.source,
                    **place,  # type: ignore[arg-type]
                )
            )
        else:
            label = atlas.names.index(thing.name)
            sprite = sprites[thing.name, thing.source]
            items.append(Item(label=label, sprite=sprite, **place))  # type: ignore[arg-type]
    strip = None
    if example.text:
        strip = Strip(
            text=example.text,
            x=0.5,
            y=0.14,
            width=0.55,
            height=0.17,
            angle=0.0,
            ink=COLOUR_NAMES.index("white"),
            card=COLOUR_NAMES.index("blue"),
        )
    return Scene(
        ground=example.ground, items=items, strip=strip, event=example.event, frames=frames
    )


def _colour(name: str) -> Colour:
    r, g, b = COLOUR_RGB[COLOUR_NAMES.index(name)]
    return float(r), float(g), float(b)


def write_gallery(atlas: Atlas, out: Path) -> None:
    """All files and ``labels.jsonl``."""
    out.mkdir(parents=True, exist_ok=True)
    sans = [font for font in find_fonts(atlas.folder) if font.endswith("Sans-Bold.ttf")]
    painter = Painter(atlas, Printer(sans or find_fonts(atlas.folder)))
    labels = []
    for example in (*EXAMPLES, CLIP):
        path = out / example.file
        if path.suffix == ".mp4":
            scene = scene_of(example, atlas, _CLIP_FRAMES)
            save_clip(painter.frames(scene, *example.size), path, _CLIP_RATE)
        else:
            image = painter.picture(scene_of(example, atlas), *example.size)
            _save(image, path, rotated=example.rotated)
        labels.append(
            {"file": example.file, "prompt": example.prompt, "expected": example.expected}
        )
    lines = "".join(json.dumps(label) + "\n" for label in labels)
    (out / "labels.jsonl").write_text(lines, encoding="utf-8")


def _save(image: Image.Image, path: Path, *, rotated: bool) -> None:
    exif = Image.Exif()
    if rotated:
        image = image.transpose(Image.Transpose.ROTATE_90)
        exif[_EXIF_ORIENTATION] = _ROTATED
    if path.suffix == ".png":
        image.save(path, optimize=True)
    else:
        image.save(path, quality=92, exif=exif)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m k3vl.demo.gallery", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--atlas", type=Path, required=True, help="folder with sheets and fonts")
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    args = parser.parse_args(arguments)
    write_gallery(load_atlas(args.atlas), args.out)


if __name__ == "__main__":
    main()
