"""Random scenes: which drawings lie where, on which ground, with which text or movement.

A scene is a plain value; ``tasks`` asks questions about it, ``paint`` and ``compose`` draw it.
Positions and sizes are shares of the picture: x of its width, y of its height, sizes of its
shorter side.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from k3vl.demo import words
from k3vl.demo.atlas import (
    COLOUR_NAMES,
    COLOUR_RGB,
    COLOURS,
    MORE,
    SHAPES,
    TRAIN,
    Atlas,
    is_one_colour,
)
from k3vl.demo.grammar import countable
from k3vl.demo.places import is_apart

if TYPE_CHECKING:
    from k3vl.demo.charts import Chart

EventKind: TypeAlias = Literal["right", "left", "down", "up", "appear", "disappear"]
EVENTS: tuple[EventKind, ...] = ("right", "left", "down", "up", "appear", "disappear")
Colour: TypeAlias = tuple[float, float, float]

MAX_ITEMS = 6
# Drawings of a sprite in the training composer: the first is plain, those up to KEEPS_COLOUR leave
# its colours alone (outlines, ink, warps), the rest may change them; see ``variants``.
VARIANTS, KEEPS_SHAPE, KEEPS_COLOUR = 16, 3, 7
_PLAIN_SHARE = 0.35
_MORE_SHARE = 0.3  # of the line icons where a name has them
GROUP = 4  # frames of a clip that the tower sees together
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
    """One picture, or a clip of ``frames`` pictures.

    Attributes:
        event: what the first item does; ``later`` what the second one does after it.
        times: text of the timestamp in front of each group of a clip, for questions about time.
        chart: the picture is this chart, and there is nothing else.
    """

    ground: Ground
    items: list[Item]
    strip: Strip | None = None
    event: Event | None = None
    later: Event | None = None
    frames: int = 1
    times: tuple[str, ...] = ()
    chart: Chart | None = None

    def at(self, item: int, frame: int) -> tuple[float, float, bool]:
        """Place of an item in a frame, and whether it is visible."""
        it = self.items[item]
        ev = (self.event, self.later)[item] if item < 2 else None
        if ev is None:
            return it.x, it.y, True
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
        digits: the text is a number.
        frames: pictures of a clip; 1 is a still.
        events: of a clip; two need more than one group.
        small: the picture is about 112 pixels or less: few and large drawings, no text.
    """

    items: int | None = None
    repeat: bool | None = None
    shapes: bool | None = None
    text: bool | None = None
    digits: bool | None = None
    frames: int = 1
    events: int | None = None
    small: bool = False


class SceneMaker:
    """Draws scenes by chance.

    Args:
        atlas: the drawings.
        seed: makes the sequence repeatable.
        style: one of ``atlas.styles``.
        printed: words for text strips; by default those that training may print.
        noise: for training: vary how drawings look, and leave no doubt which of two things lies
            further left, because what is told from left to right has one right order.
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
        self._more = atlas.by_name(MORE) if noise and MORE in atlas.all_styles else {}
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
        count = self._count(options) if options.items is None else options.items
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
            scene.strip = self._strip(band, shades, options)
        if not still:
            self._add_events(scene, options.events)
        return scene

    # ------------------------------------------------------------------ parts

    def _count(self, options: SceneOptions) -> int:
        rng = self.rng
        if options.frames > 1:
            return rng.choice((1, 2, 2) if options.frames > GROUP else (1, 1, 2))
        if options.small:
            return rng.choice((1, 1, 1, 2, 2, 3))
        return rng.choices(range(1, MAX_ITEMS + 1), _COUNT_SHARES)[0]

    def _names(self, count: int, repeat: bool | None) -> list[int]:
        rng = self.rng
        if repeat is None:
            repeat = rng.random() < 0.4
        if not repeat or count < 2:
            return [rng.choice(self.pool) for _ in range(count)]
        if rng.random() < 0.5:
            return [rng.choice(self._countable)] * count
        names = [rng.choice(self.pool) for _ in range(count - 1)]
        countables = [n for n in names if countable(self.atlas.names[n])]
        return [*names, rng.choice(countables or self._countable)]

    def _places(self, count: int, *, large: bool) -> list[tuple[float, float, float]]:
        """Centres and sizes that hardly overlap."""
        rng = self.rng
        if not count:
            return []
        low, high = _SIZES[count]
        if large and count == 1:
            low = 0.6
        while True:
            out: list[tuple[float, float, float]] = []
            for _ in range(200):
                z = rng.uniform(low, high)
                x, y = rng.uniform(z / 2, 1 - z / 2), rng.uniform(z / 2, 1 - z / 2)
                clear = not self.noise or all(is_apart(x, a) for a, _, _ in out)
                if clear and all(max(abs(x - a), abs(y - b)) > (z + c) * 0.46 for a, b, c in out):
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
        own = self.sprites[name]
        if name in self._more and rng.random() < _MORE_SHARE:
            own = self._more[name]
        sprite = rng.choice(own)
        one_colour = is_one_colour(self.atlas.sprites[sprite].drawing_set)
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
        if self.noise and rng.random() >= _PLAIN_SHARE:
            last = KEEPS_SHAPE if one_colour else KEEPS_COLOUR if item.fixed else VARIANTS - 1
            item.variant = rng.randint(1, last)
        return item

    def _strip(self, band: str, shades: np.ndarray, options: SceneOptions) -> Strip:
        rng = self.rng
        if options.digits or (options.digits is None and rng.random() < 0.15):
            text = words.draw_number(rng)
        else:
            text = words.draw_text(rng, self.printed)
        height = rng.uniform(0.11, 0.19)
        if options.items == 0:
            height *= rng.uniform(1.0, 2.5)
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

    def _add_events(self, scene: Scene, events: int | None) -> None:
        rng = self.rng
        if events is None:
            events = 2 if scene.frames > GROUP and rng.random() < 0.6 else 1
        first = scene.items[0]
        first.size = min(first.size, 0.45)
        for other in scene.items[1:]:
            other.size = min(other.size, 0.3)
        # Two of the same name would make the answer ambiguous.
        scene.items = [first, *(o for o in scene.items[1:] if o.name != first.name)]
        if events == 2 and len(scene.items) > 1:
            # In different groups, or the order could not be seen.
            change = rng.randrange(GROUP, scene.frames)
            early, late = rng.randint(1, change // GROUP * GROUP - 1), change
            scene.event = Event(kind=rng.choice(("appear", "disappear")), frame=early)
            scene.later = Event(kind=rng.choice(("appear", "disappear")), frame=late)
            return
        kind = rng.choice(EVENTS)
        if kind in ("appear", "disappear"):
            scene.event = Event(kind=kind, frame=rng.randint(1, scene.frames - 1))
            return
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

    def another_place(self, scene: Scene, item: Item) -> tuple[float, float] | None:
        """Where ``item`` could lie, well apart from its place and from everything else."""
        half = item.size / 2
        low, high = 0.0, 1.0
        if scene.strip is not None:
            low, high = (0.25, 1.0) if scene.strip.y < 0.5 else (0.0, 0.75)
        for _ in range(100):
            x = self.rng.uniform(half, 1 - half)
            y = self.rng.uniform(min(low + half, 0.5), max(high - half, 0.5))
            far = max(abs(x - item.x), abs(y - item.y)) > 0.28
            if far and all(
                max(abs(x - o.x), abs(y - o.y)) > (item.size + o.size) * 0.46
                for o in scene.items
                if o is not item
            ):
                return x, y
        return None

    def another(self, scene: Scene) -> Item | None:
        """A further drawing, of a name that the scene does not have, where there is room."""
        names = {item.name for item in scene.items}
        size = self.rng.uniform(0.2, 0.35)
        ghost = Item(name="", label=0, sprite=0, x=9.0, y=9.0, size=size)
        place = self.another_place(scene, ghost)
        name = self.rng.choice(self.pool)
        if place is None or self.atlas.names[name] in names:
            return None
        shades = np.array([scene.ground.first, scene.ground.second])
        return self._drawing(name, *place, size, shades)

    def recoloured(self, scene: Scene, item: Item) -> Item:
        """The same thing in another colour; only for things of one named colour."""
        shades = np.array([scene.ground.first, scene.ground.second])
        while (colour := self._contrast(shades)) == COLOUR_NAMES.index(str(item.colour)):
            shades = shades * 0 + self.rng.random()
        return replace(item, tint=_rgb(COLOUR_RGB[colour]), colour=COLOUR_NAMES[colour])


def _rgb(values: np.ndarray) -> Colour:
    return float(values[0]), float(values[1]), float(values[2])
