"""Training batches on the CPU: scenes, conversations and the arrays that the GPU needs.

All batches of a bucket have the same shapes. The size of every single picture still varies: it ends
up to 27 pixels before the grid does, and the rest is black, as the media processor pads it. No
torch here: workers stay light.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from k3vl.demo.atlas import TRAIN, Atlas
from k3vl.demo.buckets import CELL_PIXELS, STILL, TOKENS
from k3vl.demo.charts import draw_chart, random_chart
from k3vl.demo.chat import MEDIA_PAD, ROW_PAD, Chat, Media, Row, Style
from k3vl.demo.clips import group_times
from k3vl.demo.edits import difference_turns, edited, several_turns
from k3vl.demo.scene import CHESSBOARD, MAX_ITEMS, Ground, Item, Scene, SceneMaker, SceneOptions
from k3vl.demo.talks import Talk, Talker
from k3vl.demo.tasks import Questioner, caption
from k3vl.demo.tool_tasks import declare, random_tools, tool_rows, tool_turn
from k3vl.xtml.wording import THINKING_EFFORTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from k3vl.demo.buckets import Bucket
    from k3vl.demo.turns import Turn

_TRANSPARENT = 0.06
# Shares of stills without a drawing, and of those made to show a number.
_EMPTY, _NUMBER = 0.03, 0.14
_DIFFERENCES = 0.75  # of pairs in one message; the others are unrelated pictures
_CHANGES = 0.12  # of chats about two pictures: the second is the first after a change
_CALLS = 0.6  # of questions that bring something are for a call, where tools are declared
_SYSTEMS = ("You are a helpful assistant.", "Answer briefly.", "You describe pictures.")
_PAPER = Ground(kind=0, first=CHESSBOARD[0], second=CHESSBOARD[1], angle=0.0)
# Frame rates that files have; the last is NTSC.
_FILE_RATES = (1.0, 2.0, 4.0, 5.0, 8.0, 10.0, 12.0, 15.0, 24.0, 25.0, 30.0, 30000 / 1001)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Arrays of one batch; P pictures and clips with F frames in all, K = 6 sprite slots.

    Attributes:
        ids: [B, row] int16 tokens.
        slots: [B, items, visual] int32, positions in the flattened rows that features replace.
        predict, target, weight: [N] flat positions whose next token is ``target``, and its weight.
        turn: [N] number of the answer that a target belongs to, counted over the batch.
        sprite, variant, label, fixed: [P, K].
        geometry: [F, K, 5] centre x, y, size in pixels (-1: not there), angle, flip.
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
            areas = [self._extent(bucket) for _ in bucket.media]
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
        talk = self._chat_talk(bucket) if bucket.chat else self._talk(bucket, task, options)
        if not talk.turns:
            return None
        shown = iter(self._media(bucket, areas, talk.scenes))
        brought = [[part for _ in range(n) for part in next(shown)] for n in talk.brings]
        style = self._style(bucket, talk.tools, plain=task is not None)
        row = self._chat.row(brought, talk.turns, style, bucket.row)
        # A message that does not fit is left out, and what it brings with it.
        return (talk.scenes, row) if len(row.media) == len(bucket.runs) else None

    def _talk(self, bucket: Bucket, task: str | None, options: SceneOptions | None) -> Talk:
        """All that is shown comes with the first question."""
        if len(bucket.media) > 1:
            scenes, turns = self._several(bucket, task, options)
            return Talk(scenes=scenes, turns=turns, brings=(len(scenes),))
        scene = self._scene(bucket, 0, options)
        tools = ""
        if bucket.tools:
            plain = self._questions.turns(scene, 2)
            turns, tools = tool_rows(self._rng, scene, self._caption, plain)
        elif task is None:
            turns = self._questions.turns(scene)
        else:
            turn = self._questions.ask(task, scene)
            turns = [turn] if turn is not None else []
        return Talk(scenes=[scene], turns=turns, brings=(1,), tools=tools)

    def _chat_talk(self, bucket: Bucket) -> Talk:
        """Every picture and clip comes with a question of its own."""
        rng = self._rng
        plain = bucket.media == (STILL, STILL) and not (bucket.charts or bucket.tools)
        if plain and rng.random() < _CHANGES and (talk := self._changed()) is not None:
            return talk
        scenes = [self._scene(bucket, index, None) for index in range(len(bucket.media))]
        declared = random_tools(rng) if bucket.tools else []

        def ask(scene: Scene) -> Turn | None:
            if declared and rng.random() < _CALLS:
                turn = tool_turn(rng, scene, rng.choice(declared), self._caption)
                if turn is not None and turn.results:
                    return turn
            return next(iter(self._questions.turns(scene, 1)), None)

        talker = Talker(rng, ask, self._caption)
        return talker.talk(scenes, declare(declared) if declared else "")

    def _changed(self) -> Talk | None:
        """A picture, then the same one after a change."""
        scenes, turns = self._edited(None)
        first = self._questions.turns(scenes[0], 1)
        if not turns or not first or first[0].notice is not None:
            return None
        return Talk(scenes=scenes, turns=[*first, *turns], brings=(1, 1))

    def _scene(self, bucket: Bucket, index: int, options: SceneOptions | None) -> Scene:
        """What a picture or clip of a bucket shows."""
        if bucket.charts:
            return Scene(ground=_PAPER, items=[], chart=random_chart(self._rng))
        frames = bucket.frames[index]
        scene = self._maker.scene(options or self._options(bucket, frames))
        if bucket.media[index] != STILL:
            scene.times = group_times(self._rng.choice(_FILE_RATES), frames)
        return scene

    def _several(
        self, bucket: Bucket, task: str | None, options: SceneOptions | None
    ) -> tuple[list[Scene], list[Turn]]:
        """Two pictures that differ in one thing, or unrelated ones."""
        rng = self._rng
        differ = len(bucket.media) == 2 and rng.random() < _DIFFERENCES
        if task is not None:
            differ = task == "difference"
        if not differ:
            scenes = [self._scene(bucket, i, options) for i in range(len(bucket.media))]
            return scenes, several_turns(rng, scenes, self._caption)
        scenes, turns = self._edited(options)
        if task is not None:
            return scenes, [turn for turn in turns if turn.task == task]
        return scenes, turns and [*turns, *several_turns(rng, scenes, self._caption)[:2]]

    def _edited(self, options: SceneOptions | None) -> tuple[list[Scene], list[Turn]]:
        """A scene before and after a change, and questions about it; none where none can be."""
        rng = self._rng
        scene = self._maker.scene(
            options or SceneOptions(items=rng.randint(1, 4), shapes=rng.random() < 0.5)
        )
        if (found := edited(self._maker, scene)) is None:
            return [scene], []
        scenes = [scene, found[0]]
        return scenes, difference_turns(rng, scenes, found[1])

    def _options(self, bucket: Bucket, frames: int) -> SceneOptions:
        """What kind of scene a bucket wants this time."""
        small = min(bucket.height, bucket.width) <= 140
        if max(bucket.height, bucket.width) <= 84:
            return SceneOptions(items=1, small=True)
        at_once = len(bucket.media) > 1 and not bucket.chat
        if frames > 1 or at_once or small:
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
    ) -> list[list[Media]]:
        """The parts of every picture and clip in the prompt."""
        out = []
        for (height, width), scene in zip(areas, scenes, strict=True):
            if scene.frames > 1:
                out.append([Media("video", bucket.visual, time) for time in scene.times])
                continue
            # Beyond the patch limit a file is shrunk, and the header still says its own size.
            grown = 1.0
            if bucket.height * bucket.width >= 336 * 448 and self._rng.random() < 0.7:
                grown = self._rng.uniform(1.0, 9.0)
            size = f"image {int(width * grown)}x{int(height * grown)}"
            out.append([Media(size, bucket.visual)])
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
        **_picture_arrays(scenes, extents),
    )


def _picture_arrays(scenes: list[Scene], extents: list[tuple[int, int]]) -> dict[str, Any]:
    n, k = len(scenes), MAX_ITEMS
    frames = sum(scene.frames for scene in scenes)
    out: dict[str, Any] = {
        "sprite": np.full((n, k), -1, np.int32),
        "variant": np.zeros((n, k), np.int8),
        "label": np.zeros((n, k), np.int16),
        "fixed": np.ones((n, k), np.int8),
        "geometry": np.full((frames, k, 5), -1, np.float32),
        "tint": np.full((n, k, 3), -1, np.float32),
        "ground": np.zeros((n, 8), np.float32),
        "extent": np.array(extents, np.float32),
        "strip": np.full((n, 6), -1, np.float32),
        "strip_colours": np.zeros((n, 2), np.int8),
        "texts": [None] * n,
    }
    first = 0
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
            for f in range(scene.frames):
                x, y, there = scene.at(slot, f)
                size = item.size * side if there else -1.0
                place = (x * width, y * height, size, item.angle, item.flip)
                out["geometry"][first + f, slot] = place
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
        first += scene.frames
    return out
