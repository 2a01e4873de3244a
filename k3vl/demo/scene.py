"""Random scenes: which drawings lie where, on which ground, with which text or movement.

A scene is a plain value; ``tasks`` asks questions about it, ``paint`` and ``compose`` draw it.
Positions and sizes are shares of the picture: x of its width, y of its height, sizes of its
shorter side.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from k3vl.demo import words
from k3vl.demo.atlas import COLOUR_NAMES, COLOUR_RGB, COLOURS, ONE_COLOUR_SET, SHAPES, TRAIN, Atlas
from k3vl.demo.grammar import countable

EventKind: TypeAlias = Literal["right", "left", "down", "up", "appear", "disappear"]
EVENTS: tuple[EventKind, ...] = ("right", "left", "down", "up", "appear", "disappear")
Colour: TypeAlias = tuple[float, float, float]

MAX_ITEMS = 6
# Variants of a sprite in the training composer: plain, thin outline, thick outline, inked inner
# edges, line art, soft.
VARIANT_SHARES = (0.46, 0.10, 0.10, 0.16, 0.08, 0.10)
_LINE_ART = 4
# The shipped media configuration: squares of 8 pixels, white and grey.
CHESSBOARD_SQUARE = 8
CHESSBOARD = ((1.0, 1.0, 1.0), (180 / 255, 180 / 255, 180 / 255))
# Sizes that keep n drawings apart, by n.
_SIZES = {
    1: (0.42, 0.95),
    2: (0.30, 0.48),
    3: (0.26, 0.40),
    4: (0.23, 0.36),
    5: (0.20, 0.32),
    6: (0.18, 0.30),
}
_COUNT_SHARES = (10, 20, 24, 22, 14, 10)


@dataclass(slots=True, kw_only=True)
class Item:
    """One drawing in a scene.

    Attributes:
        name: what it shows, without a colour.
        label: class of a dense cell: name index, then shapes.
        sprite: sprite index in the atlas; shapes follow after the last sprite.
        variant: how the training composer redraws it.
        angle: radians; flip: -1 mirrors it.
        tint: replaces all colour; colour: the word for it, where one may ask.
        fixed: appearance noise must leave its colour alone.
    """

    name: str
    label: int
    sprite: int
    x: float
    y: float
    size: float
    angle: float = 0.0
    flip: int = 1
    variant: int = 0
    tint: Colour | None = None
    colour: str | None = None
    fixed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """Printed text; ``ink`` and ``card`` are colour indices, ``card`` -1 means none."""

    text: str
    x: float
    y: float
    width: float
    height: float
    angle: float
    ink: int
    card: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What the first item does in a clip.

    Attributes:
        frame: first frame where it is there (appear) or gone (disappear).
        path: start and end along the axis of movement.
    """

    kind: EventKind
    frame: int = 0
    path: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What lies behind: flat, a gradient to ``second``, blurred noise, or nothing.

    Nothing (kind 3) is a transparent file, under which the processor lays its chessboard.
    """

    kind: Literal[0, 1, 2, 3]
    first: Colour
    second: Colour
    angle: float


@dataclass(slots=True, kw_only=True)
class Scene:
    """One picture, or a clip of ``frames`` pictures."""

    ground: Ground
    items: list[Item]
    strip: Strip | None = None
    event: Event | None = None
    frames: int = 1

    def at(self, item: int, frame: int) -> tuple[float, float, bool]:
        """Place of an item in a frame, and whether it is visible."""
        it = self.items[item]
        if item or self.event is None:
            return it.x, it.y, True
        ev = self.event
        if ev.kind == "appear":
            return it.x, it.y, frame >= ev.frame
        if ev.kind == "disappear":
            return it.x, it.y, frame < ev.frame
        start, end = ev.path
        along = start + (end - start) * frame / max(1, self.frames - 1)
        return (along, it.y, True) if ev.kind in ("left", "right") else (it.x, along, True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneOptions:
    """What kind of scene is wanted; None leaves it to chance.

    Attributes:
        items: number of drawings.
        repeat: several drawings of one name.
        shapes: coloured shapes among them.
        text: a strip of text.
        frames: pictures of a clip; 1 is a still.
        small: the picture is about 112 pixels or less: few and large drawings, no text.
    """

    items: int | None = None
    repeat: bool | None = None
    shapes: bool | None = None
    text: bool | None = None
    frames: int = 1
    small: bool = False


class SceneMaker:
    """Draws scenes by chance.

    Args:
        atlas: the drawings.
        seed: makes the sequence repeatable.
        style: one of ``atlas.styles``.
        printed: words for text strips; by default those that training may print.
        noise: vary how sprites are drawn (training); plain drawings otherwise.
        transparent: share of scenes without a ground.
    """

    def __init__(
        self,
        atlas: Atlas,
        seed: int,
        *,
        style: str = TRAIN,
        printed: list[str] | None = None,
        noise: bool = False,
        transparent: float = 0.0,
    ) -> None:
        self.rng = random.Random(seed)  # noqa: S311 - scenes, not secrets
        self._transparent = transparent
        self.atlas = atlas
        self.noise = noise
        self.printed = printed or words.word_list(atlas.names, unseen=False)
        self.sprites = atlas.by_name(style)
        self.pool = sorted(self.sprites)
        self._countable = [i for i in self.pool if countable(atlas.names[i])]
        self._coloured = frozenset(
            i
            for i, name in enumerate(atlas.names)
            if set(name.split()) & set(COLOURS) or "square" in name or "circle" in name
        )

    def scene(self, options: SceneOptions) -> Scene:
        """One random scene."""
        rng = self.rng
        ground, shades = self._ground()
        count = options.items or self._count(options)
        still = options.frames == 1
        text = options.text
        if text is None:
            text = still and not options.small and count <= 3 and rng.random() < 0.55
        shapes = options.shapes if options.shapes is not None else still and rng.random() < 0.3
        band = rng.choice("tb") if text else ""
        places = self._places(count, large=options.small)
        names = self._names(count, options.repeat)
        items = []
        for (x, y, size), name in zip(places, names, strict=True):
            if band:  # the strip has a quarter of the picture to itself
                size *= 0.75
                y = 0.25 + 0.75 * y if band == "t" else 0.75 * y
            if shapes and rng.random() < 0.4:
                items.append(self._shape(x, y, size, shades))
            else:
                items.append(self._drawing(name, x, y, size, shades))
        scene = Scene(ground=ground, items=items, frames=options.frames)
        if band:
            scene.strip = self._strip(band, shades)
        if not still:
            self._add_event(scene)
        return scene

    # ------------------------------------------------------------------ parts

    def _count(self, options: SceneOptions) -> int:
        rng = self.rng
        if options.frames > 1:
            return rng.choice((1, 1, 2))
        if options.small:
            return rng.choice((1, 1, 1, 2, 2, 3))
        return rng.choices(range(1, MAX_ITEMS + 1), _COUNT_SHARES)[0]

    def _names(self, count: int, repeat: bool | None) -> list[int]:
        rng = self.rng
        if repeat is None:
            repeat = rng.random() < 0.35
        if not repeat or count == 1:
            return [rng.choice(self.pool) for _ in range(count)]
        if rng.random() < 0.5:
            return [rng.choice(self._countable)] * count
        names = [rng.choice(self.pool) for _ in range(count - 1)]
        countables = [n for n in names if countable(self.atlas.names[n])]
        return [*names, rng.choice(countables or self._countable)]

    def _places(self, count: int, *, large: bool) -> list[tuple[float, float, float]]:
        """Centres and sizes that hardly overlap."""
        rng = self.rng
        low, high = _SIZES[count]
        if large and count == 1:
            low = 0.6
        while True:
            out: list[tuple[float, float, float]] = []
            for _ in range(200):
                z = rng.uniform(low, high)
                x, y = rng.uniform(z / 2, 1 - z / 2), rng.uniform(z / 2, 1 - z / 2)
                if all(max(abs(x - a), abs(y - b)) > (z + c) * 0.46 for a, b, c in out):
                    out.append((x, y, z))
                if len(out) == count:
                    return out

    def _ground(self) -> tuple[Ground, np.ndarray]:
        """A ground and the two shades that things must stand out from."""
        rng = self.rng
        if rng.random() < self._transparent:
            board = Ground(kind=3, first=CHESSBOARD[0], second=CHESSBOARD[1], angle=0.0)
            return board, np.array(CHESSBOARD)
        first = np.array([rng.random() for _ in range(3)])
        second = np.array([rng.random() for _ in range(3)])
        if rng.random() < 0.6:
            first = 0.75 + 0.25 * first
        if rng.random() < 0.15:
            first = np.ones(3)
        kind: Literal[0, 1, 2] = rng.choice((0, 0, 1, 2))
        far = first * 0.4 + second * 0.6 if kind == 1 else first
        ground = Ground(
            kind=kind, first=_rgb(first), second=_rgb(second), angle=rng.uniform(0, 6.283)
        )
        return ground, np.stack([first, far])

    def _contrast(self, shades: np.ndarray) -> int:
        """A colour index that stands out from both shades."""
        for _ in range(20):
            c = self.rng.randrange(len(COLOUR_NAMES))
            if np.abs(COLOUR_RGB[c] - shades).max(1).min() > 0.35:
                return c
        return COLOUR_NAMES.index("black" if shades[0].mean() > 0.5 else "white")

    def _shape(self, x: float, y: float, size: float, shades: np.ndarray) -> Item:
        rng = self.rng
        kind, colour = rng.randrange(len(SHAPES)), self._contrast(shades)
        drift = np.array([rng.uniform(-0.05, 0.05) for _ in range(3)])
        return Item(
            name=SHAPES[kind],
            label=len(self.atlas.names) + kind,
            sprite=len(self.atlas.sprites) + kind,
            x=x,
            y=y,
            size=min(size, 0.6),
            angle=rng.uniform(-0.25, 0.25),
            tint=_rgb(np.clip(COLOUR_RGB[colour] + drift, 0, 1)),
            colour=COLOUR_NAMES[colour],
            fixed=True,
        )

    def _drawing(self, name: int, x: float, y: float, size: float, shades: np.ndarray) -> Item:
        rng = self.rng
        sprite = rng.choice(self.sprites[name])
        one_colour = self.atlas.sprites[sprite].drawing_set == ONE_COLOUR_SET
        item = Item(
            name=self.atlas.names[name],
            label=name,
            sprite=sprite,
            x=x,
            y=y,
            size=size,
            angle=rng.uniform(-0.25, 0.25),
            flip=rng.choice((-1, 1)),
            fixed=name in self._coloured,
        )
        if one_colour:
            colour = self._contrast(shades)
            item.tint, item.fixed = _rgb(COLOUR_RGB[colour]), True
            # "What colour is the green book?" has an answer that is not the tint.
            item.colour = None if name in self._coloured else COLOUR_NAMES[colour]
        elif self.noise:
            item.variant = rng.choices(range(len(VARIANT_SHARES)), VARIANT_SHARES)[0]
            item.fixed |= item.variant == _LINE_ART
        return item

    def _strip(self, band: str, shades: np.ndarray) -> Strip:
        rng = self.rng
        text = words.draw_text(rng, self.printed)
        height = rng.uniform(0.11, 0.19)
        width = min(height * (0.62 * len(text) + 0.5) * rng.uniform(0.9, 1.2), 0.96)
        y = height / 2 + 0.02 if band == "t" else 1 - height / 2 - 0.02
        ink, card = self._contrast(shades), -1
        if rng.random() < 0.5:
            card = rng.randrange(len(COLOUR_NAMES))
            apart = np.abs(COLOUR_RGB - COLOUR_RGB[card]).max(1) > 0.4
            ink = rng.choice([int(c) for c in np.flatnonzero(apart)])
        return Strip(
            text=text,
            x=rng.uniform(width / 2, 1 - width / 2),
            y=y,
            width=width,
            height=height,
            angle=rng.uniform(-0.06, 0.06),
            ink=ink,
            card=card,
        )

    def _add_event(self, scene: Scene) -> None:
        rng = self.rng
        first = scene.items[0]
        kind = rng.choice(EVENTS)
        first.size = min(first.size, 0.45)
        if kind in ("appear", "disappear"):
            scene.event = Event(kind=kind, frame=rng.randint(1, scene.frames - 1))
        else:
            half = first.size / 2
            start = half + rng.uniform(0, 0.08)
            end = 1 - half - rng.uniform(0, 0.08)
            shorter = 0.5 * rng.random() * (end - start)
            if rng.random() < 0.5:
                end -= shorter
            else:
                start += shorter
            path = (end, start) if kind in ("left", "up") else (start, end)
            scene.event = Event(kind=kind, path=path)
        for other in scene.items[1:]:
            other.size = min(other.size, 0.3)
        # Two of the same name would make the answer ambiguous.
        scene.items = [first, *(o for o in scene.items[1:] if o.name != first.name)]


def _rgb(values: np.ndarray) -> Colour:
    return float(values[0]), float(values[1]), float(values[2])
