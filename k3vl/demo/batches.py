"""Training batches on the CPU: scenes, conversations and the arrays that the GPU needs.

A *bucket* fixes the grid of a picture, the frames and the row length, so that every batch of a
bucket has the same shapes; all buckets have the same number of language tokens. The size of every
single picture still varies: it ends up to 27 pixels before the grid does, and the rest is black, as
the media processor pads it. No torch here: workers stay light.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from k3vl.demo.atlas import TRAIN, Atlas
from k3vl.demo.charts import draw_chart, random_chart
from k3vl.demo.chat import MEDIA_PAD, ROW_PAD, Chat, Media, Row, Style
from k3vl.demo.clips import group_times
from k3vl.demo.edits import difference_turns, edited, several_turns
from k3vl.demo.scene import CHESSBOARD, MAX_ITEMS, Ground, Item, Scene, SceneMaker, SceneOptions
from k3vl.demo.tasks import Questioner, caption
from k3vl.demo.tool_tasks import tool_rows
from k3vl.xtml.wording import THINKING_EFFORTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from k3vl.demo.turns import Turn

TOKENS = 98_304
"""Language tokens of one step."""

CELL_PIXELS = 28
"""A visual token covers 28 by 28 pixels."""

_TRANSPARENT = 0.06
# Shares of stills without a drawing, and of those made to show a number.
_EMPTY, _NUMBER = 0.03, 0.14
_DIFFERENCES = 0.75  # of pairs; the others are unrelated pictures
_SYSTEMS = ("You are a helpful assistant.", "Answer briefly.", "You describe pictures.")
_PAPER = Ground(kind=0, first=CHESSBOARD[0], second=CHESSBOARD[1], angle=0.0)
# Frame rates that files have; the last is NTSC.
_FILE_RATES = (1.0, 2.0, 4.0, 5.0, 8.0, 10.0, 12.0, 15.0, 24.0, 25.0, 30.0, 30000 / 1001)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Shapes of one kind of batch.

    Attributes:
        height, width: of the padded grid, pixels.
        row: tokens of a row.
        share: how often it is drawn.
        groups: frames of every group of a clip; () for pictures.
        pictures: pictures of one message.
        thinking: share of conversations with the think channel.
        charts: pictures are bar charts.
        tools: conversations declare tools.
        early: used from the start, before the full mix.
    """

    name: str
    height: int
    width: int
    row: int
    share: int
    groups: tuple[int, ...] = ()
    pictures: int = 1
    thinking: float = 0.0
    charts: bool = False
    tools: bool = False
    early: bool = False

    @property
    def frames(self) -> int:
        """Pictures of one clip."""
        return sum(self.groups) or 1

    @property
    def visual(self) -> int:
        """Visual tokens of one picture or group."""
        return self.height * self.width // CELL_PIXELS**2

    @property
    def runs(self) -> tuple[int, ...]:
        """Frames of every media item of a row."""
        return self.groups or (1,) * self.pictures


_SOME = 0.3  # of conversations think where rows have room
BUCKETS = (
    Bucket(name="img224", height=224, width=224, row=192, share=25),
    Bucket(name="think224", height=224, width=224, row=256, share=8, thinking=1.0),
    Bucket(name="tool168", height=168, width=168, row=512, share=7, thinking=_SOME, tools=True),
    Bucket(name="land", height=168, width=224, row=192, share=6),
    Bucket(name="port", height=224, width=168, row=192, share=5),
    Bucket(name="wide", height=112, width=336, row=192, share=2),
    Bucket(name="tall", height=336, width=112, row=192, share=2),
    Bucket(name="big", height=336, width=448, row=384, share=3, thinking=_SOME),
    Bucket(name="img448", height=448, width=448, row=384, share=3),
    Bucket(name="img140", height=140, width=140, row=128, share=5),
    Bucket(name="img112", height=112, width=112, row=128, share=6, early=True),
    Bucket(name="img84", height=84, width=84, row=64, share=3, early=True),
    Bucket(name="img56", height=56, width=56, row=64, share=1),
    Bucket(name="chart224", height=224, width=224, row=192, share=5, charts=True),
    Bucket(name="chart336", height=224, width=336, row=256, share=2, thinking=_SOME, charts=True),
    Bucket(name="pair168", height=168, width=168, row=192, share=8, pictures=2),
    Bucket(name="pair224", height=224, width=224, row=256, share=3, pictures=2),
    Bucket(name="trio112", height=112, width=112, row=192, share=2, thinking=_SOME, pictures=3),
    Bucket(name="vid112", height=112, width=112, row=128, share=5, groups=(4,)),
    Bucket(name="vid112x2", height=112, width=112, row=256, share=5, groups=(4, 4)),
    Bucket(name="vid112x4", height=112, width=112, row=384, share=3, groups=(4, 4, 4, 4)),
    Bucket(name="vid168", height=168, width=224, row=256, share=2, groups=(4,)),
    Bucket(name="vid168x2", height=168, width=224, row=512, share=2, groups=(4, 4)),
    Bucket(name="vid112tail2", height=112, width=112, row=192, share=2, groups=(4, 2)),
    Bucket(name="vid112tail1", height=112, width=112, row=256, share=1, groups=(4, 4, 1)),
    Bucket(name="vid112short", height=112, width=112, row=128, share=1, groups=(3,)),
    Bucket(name="vidthink", height=112, width=112, row=256, share=2, groups=(4, 4), thinking=1.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Arrays of one batch; P pictures or clips, F frames each, K = 6 sprite slots.

    Attributes:
        ids: [B, row] int16 tokens.
        slots: [B, items, visual] int32, positions in the flattened rows that features replace.
        predict, target, weight: [N] flat positions whose next token is ``target``, and its weight.
        turn: [N] number of the answer that a target belongs to, counted over the batch.
        sprite, variant, label, fixed: [P, K].
        geometry: [P, F, K, 5] centre x, y, size in pixels (-1: not there), angle, flip.
        tint: [P, K, 3], -1 for none.
        ground: [P, 8] two colours, kind, angle.
        extent: [P, 2] height and width of the picture inside the grid.
        strip: [P, 6] x, y, width, height in pixels, angle; width -1 for none.
        strip_colours: [P, 2] ink and card, as colour indices.
        texts: [P] printed text or None.
        raster: [P, height, width, 3] pictures that are not composed; only of chart buckets.
        rows: what was said, for evaluation.
    """

    bucket: Bucket
    ids: NDArray[np.int16]
    slots: NDArray[np.int32]
    predict: NDArray[np.int32]
    target: NDArray[np.int16]
    weight: NDArray[np.float32]
    turn: NDArray[np.int32]
    sprite: NDArray[np.int32]
    variant: NDArray[np.int8]
    label: NDArray[np.int16]
    fixed: NDArray[np.int8]
    geometry: NDArray[np.float32]
    tint: NDArray[np.float32]
    ground: NDArray[np.float32]
    extent: NDArray[np.float32]
    strip: NDArray[np.float32]
    strip_colours: NDArray[np.int8]
    texts: list[str | None]
    raster: NDArray[np.uint8] | None
    rows: list[Row]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Everything that is an array, by name."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


class BatchMaker:
    """Builds batches of any bucket.

    Args:
        atlas: the drawings.
        chat: encodes the conversations.
        seed: makes the sequence repeatable.
        style: drawings to use.
        noise: vary how sprites are drawn.
        printed: words for text strips; None for those of training.
        fonts: for charts.
    """

    def __init__(
        self,
        atlas: Atlas,
        chat: Chat,
        seed: int,
        fonts: Sequence[str],
        *,
        style: str = TRAIN,
        noise: bool = True,
        printed: list[str] | None = None,
    ) -> None:
        self._chat = chat
        self._fonts = fonts
        self._maker = SceneMaker(
            atlas,
            seed,
            style=style,
            noise=noise,
            printed=printed,
            transparent=_TRANSPARENT if noise else 0.0,
        )
        self._questions = Questioner(self._maker)
        self._rng = random.Random(seed + 1)  # noqa: S311 - scenes, not secrets
        self._n_names = len(atlas.names)

    def batch(
        self,
        bucket: Bucket,
        size: int | None = None,
        *,
        task: str | None = None,
        options: SceneOptions | None = None,
    ) -> Batch:
        """One batch; ``task`` asks only that question, ``options`` override the bucket's."""
        size = size or TOKENS // bucket.row
        scenes: list[Scene] = []
        extents: list[tuple[int, int]] = []
        rows: list[Row] = []
        while len(rows) < size:
            areas = [self._extent(bucket) for _ in range(bucket.pictures)]
            made = self._sample(bucket, areas, task, options)
            if made is None:
                continue
            own, row = made
            rows.append(row)
            scenes += own
            extents += areas
        raster = self._raster(bucket, scenes, extents) if bucket.charts else None
        return _assemble(bucket, scenes, extents, rows, raster)

    # ------------------------------------------------------------------ one sample

    def _sample(
        self,
        bucket: Bucket,
        areas: list[tuple[int, int]],
        task: str | None,
        options: SceneOptions | None,
    ) -> tuple[list[Scene], Row] | None:
        scenes, turns, tools = self._content(bucket, task, options)
        if not turns:
            return None
        media = self._media(bucket, areas, scenes)
        style = self._style(bucket, tools, plain=task is not None)
        row = self._chat.row(media, turns, style, bucket.row)
        return (scenes, row) if row.turns else None

    def _content(
        self, bucket: Bucket, task: str | None, options: SceneOptions | None
    ) -> tuple[list[Scene], list[Turn], str]:
        """Scenes of a sample, what is said about them, declared tools."""
        rng = self._rng
        if bucket.charts:
            scene = Scene(ground=_PAPER, items=[], chart=random_chart(rng))
            return [scene], self._questions.turns(scene), ""
        if bucket.pictures > 1:
            return (*self._several(bucket, task, options), "")
        scene = self._maker.scene(options or self._options(bucket))
        if bucket.groups:
            scene.times = group_times(rng.choice(_FILE_RATES), bucket.frames)
        if bucket.tools:
            turns, tools = tool_rows(rng, scene, self._caption, self._questions.turns(scene, 2))
            return [scene], turns, tools
        if task is None:
            return [scene], self._questions.turns(scene), ""
        turn = self._questions.ask(task, scene)
        return [scene], [turn] if turn else [], ""

    def _several(
        self, bucket: Bucket, task: str | None, options: SceneOptions | None
    ) -> tuple[list[Scene], list[Turn]]:
        """Two pictures that differ in one thing, or unrelated ones."""
        rng = self._rng
        differ = bucket.pictures == 2 and rng.random() < _DIFFERENCES
        if task is not None:
            differ = task == "difference"
        if not differ:
            scenes = [
                self._maker.scene(options or self._options(bucket)) for _ in range(bucket.pictures)
            ]
            return scenes, several_turns(rng, scenes, self._caption)
        scene = self._maker.scene(
            options or SceneOptions(items=rng.randint(1, 4), shapes=rng.random() < 0.5)
        )
        found = edited(self._maker, scene)
        if found is None:
            return [scene], []
        scenes = [scene, found[0]]
        turns = difference_turns(rng, scenes, found[1])
        if task is not None:
            return scenes, [turn for turn in turns if turn.task == task]
        return scenes, [*turns, *several_turns(rng, scenes, self._caption)[:2]]

    def _options(self, bucket: Bucket) -> SceneOptions:
        """What kind of scene a bucket wants this time."""
        small = min(bucket.height, bucket.width) <= 140
        frames = bucket.frames
        if max(bucket.height, bucket.width) <= 84:
            return SceneOptions(items=1, small=True)
        if frames > 1 or bucket.pictures > 1 or small:
            return SceneOptions(frames=frames, small=small)
        chance = self._rng.random()
        if chance < _EMPTY:
            return SceneOptions(items=0, text=None if chance < _EMPTY / 2 else False)
        if chance < _EMPTY + _NUMBER:
            return SceneOptions(
                items=self._rng.choice((0, 0, 1, 2, 3)), text=True, digits=True, repeat=False
            )
        return SceneOptions()

    def _caption(self, items: list[Item]) -> str:
        return caption(items, self._n_names)

    def _raster(
        self, bucket: Bucket, scenes: list[Scene], extents: list[tuple[int, int]]
    ) -> NDArray[np.uint8]:
        out = np.zeros((len(scenes), bucket.height, bucket.width, 3), np.uint8)
        for picture, scene, (height, width) in zip(out, scenes, extents, strict=True):
            if scene.chart is not None:
                drawn = draw_chart(scene.chart, width, height, self._fonts)
                picture[:height, :width] = np.asarray(drawn)
        return out

    def _extent(self, bucket: Bucket) -> tuple[int, int]:
        """Height and width of the picture; the grid is the next multiple of 28."""
        if self._rng.random() < 0.4:
            return bucket.height, bucket.width
        return (
            bucket.height - self._rng.randrange(CELL_PIXELS),
            bucket.width - self._rng.randrange(CELL_PIXELS),
        )

    def _style(self, bucket: Bucket, tools: str, *, plain: bool) -> Style:
        rng = self._rng
        thinking = rng.random() < bucket.thinking
        if plain:
            return Style(thinking=bucket.thinking == 1.0, tools=tools)
        effort = rng.choice(THINKING_EFFORTS) if thinking and rng.random() < 0.5 else None
        roomy = bucket.row >= 128
        return Style(
            thinking=thinking,
            effort=effort,
            system=rng.choice(_SYSTEMS) if roomy and rng.random() < 0.06 else "",
            tools=tools,
            media_last=rng.random() < 0.2,
        )

    def _media(
        self, bucket: Bucket, areas: list[tuple[int, int]], scenes: list[Scene]
    ) -> list[Media]:
        if bucket.groups:
            return [Media("video", bucket.visual, time) for time in scenes[0].times]
        out = []
        for height, width in areas:
            # Beyond the patch limit a file is shrunk, and the header still says its own size.
            grown = 1.0
            if bucket.height * bucket.width >= 336 * 448 and self._rng.random() < 0.7:
                grown = self._rng.uniform(1.0, 9.0)
            size = f"image {int(width * grown)}x{int(height * grown)}"
            out.append(Media(size, bucket.visual))
        return out


def _assemble(
    bucket: Bucket,
    scenes: list[Scene],
    extents: list[tuple[int, int]],
    rows: list[Row],
    raster: NDArray[np.uint8] | None,
) -> Batch:
    ids = np.full((len(rows), bucket.row), ROW_PAD, np.int16)
    slots = np.zeros((len(rows), len(bucket.runs), bucket.visual), np.int32)
    predict: list[int] = []
    target: list[int] = []
    weight: list[float] = []
    turn: list[int] = []
    answers = 0
    for b, row in enumerate(rows):
        ids[b, : len(row.ids)] = row.ids
        start = b * bucket.row
        slots[b] = start + np.array(row.media)[:, None] + np.arange(bucket.visual)
        predict += [start + at - 1 for at in row.targets]
        target += [row.ids[at] for at in row.targets]
        weight += row.weights
        turn += [answers + owner for owner in row.owners]
        answers += len(row.turns)
    assert (ids.reshape(-1)[slots] == MEDIA_PAD).all(), "features must replace media pads"
    return Batch(
        bucket=bucket,
        ids=ids,
        slots=slots,
        predict=np.array(predict, np.int32),
        target=np.array(target, np.int16),
        weight=np.array(weight, np.float32),
        turn=np.array(turn, np.int32),
        raster=raster,
        rows=rows,
        **_picture_arrays(bucket, scenes, extents),
    )


def _picture_arrays(
    bucket: Bucket, scenes: list[Scene], extents: list[tuple[int, int]]
) -> dict[str, Any]:
    n, k, frames = len(scenes), MAX_ITEMS, bucket.frames
    out: dict[str, Any] = {
        "sprite": np.full((n, k), -1, np.int32),
        "variant": np.zeros((n, k), np.int8),
        "label": np.zeros((n, k), np.int16),
        "fixed": np.ones((n, k), np.int8),
        "geometry": np.full((n, frames, k, 5), -1, np.float32),
        "tint": np.full((n, k, 3), -1, np.float32),
        "ground": np.zeros((n, 8), np.float32),
        "extent": np.array(extents, np.float32),
        "strip": np.full((n, 6), -1, np.float32),
        "strip_colours": np.zeros((n, 2), np.int8),
        "texts": [None] * n,
    }
    for p, (scene, (height, width)) in enumerate(zip(scenes, extents, strict=True)):
        side = min(height, width)
        g = scene.ground
        out["ground"][p] = (*g.first, *g.second, g.kind, g.angle)
        for slot, item in enumerate(scene.items):
            out["sprite"][p, slot] = item.sprite
            out["variant"][p, slot] = item.variant
            out["label"][p, slot] = item.label
            out["fixed"][p, slot] = item.fixed
            if item.tint is not None:
                out["tint"][p, slot] = item.tint
            for f in range(frames):
                x, y, there = scene.at(slot, f)
                size = item.size * side if there else -1.0
                out["geometry"][p, f, slot] = (x * width, y * height, size, item.angle, item.flip)
        if t := scene.strip:
            # The height is a share of the shorter side, the width one of the width.
            out["strip"][p] = (
                t.x * width,
                t.y * height,
                t.width * width,
                t.height * side,
                t.angle,
                1,
            )
            out["strip_colours"][p] = (t.ink, t.card)
            out["texts"][p] = t.text
    return out
