"""Scenes and questions of held-out splits, without end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from k3vl.demo.atlas import TRAIN
from k3vl.demo.charts import random_chart
from k3vl.demo.clips import group_times
from k3vl.demo.edits import difference_turns, edited, several_turns
from k3vl.demo.scene import CHESSBOARD, Ground, Scene, SceneMaker, SceneOptions
from k3vl.demo.tasks import Questioner, caption
from k3vl.demo.tool_tasks import random_tool, tool_turn
from k3vl.demo.words import word_list

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k3vl.demo.atlas import Atlas
    from k3vl.demo.scene import Item
    from k3vl.demo.tool_tasks import Tool
    from k3vl.demo.turns import Turn

FILE_RATE = 24
"""Frames a second of the clips; the shipped configuration looks at two of them."""

_SLOW = 0.3  # of the way; training never moves a thing by less than half of it
_PAPER = Ground(kind=0, first=CHESSBOARD[0], second=CHESSBOARD[1], angle=0.0)
_SIDE = 224
# What the template's own notices stand for in a request.
_NOTICES: dict[str, dict[str, Any]] = {
    "response-format": {"response_format": {"type": "json_object"}},
    "tool-choice": {"tool_choice": "required"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One row of the table.

    Attributes:
        task: which question is asked.
        style: which drawings are used.
        size: width and height of the files; None draws one between 112 and 448 pixels each time.
        scenes: options, one after the other.
        printed: ``words`` or ``codes``: print only these.
        held_font: print text in a font that training never saw.
        slow: things move by less than they ever do in training.
        options: chat options that differ from the checkpoint's.
        suffix: file type.
    """

    name: str
    task: str
    style: str = TRAIN
    size: tuple[int, int] | None = (_SIDE, _SIDE)
    scenes: tuple[SceneOptions, ...] = (SceneOptions(),)
    printed: str = ""
    held_font: bool = False
    slow: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    suffix: str = ".png"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question about one or several scenes.

    Attributes:
        tools: what is declared with it.
        options: chat options beside the split's.
    """

    scenes: tuple[Scene, ...]
    turn: Turn
    tools: tuple[Tool, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


class HeldOut:
    """Questions of one split.

    Args:
        split: which.
        atlas: the drawings.
        seed: makes the sequence repeatable.
    """

    def __init__(self, split: Split, atlas: Atlas, seed: int) -> None:
        self._split = split
        self._unseen = word_list(atlas.names, unseen=True)
        printed = self._unseen if split.task == "text" else None
        self._maker = SceneMaker(atlas, seed, style=split.style, printed=printed)
        self._questions = Questioner(self._maker)
        self._n_names = len(atlas.names)

    def __iter__(self) -> Iterator[Asked]:
        """One after the other; the scenes' options take turns."""
        made = 0
        while True:
            options = self._split.scenes[made % len(self._split.scenes)]
            if (asked := self._ask(options)) is not None:
                made += 1
                yield asked

    def _ask(self, options: SceneOptions) -> Asked | None:
        """One question, or None where this scene does not allow it."""
        task, maker = self._split.task, self._maker
        if task in ("pair", "difference"):
            return self._two(options)
        if task == "chart":
            scene = Scene(ground=_PAPER, items=[], chart=random_chart(maker.rng))
        else:
            scene = maker.scene(options)
        if scene.frames > 1:
            scene.times = group_times(FILE_RATE, scene.frames)
        if task == "tool":
            tool = random_tool(maker.rng, maker.rng.choice(("count", "caption", "tags", "log")))
            turn = tool_turn(maker.rng, scene, tool, self._caption)
            return self._with_notice((scene,), turn, (tool,)) if turn is not None else None
        turn = self._questions.ask(task, scene)
        if turn is None or turn.answer.startswith("There is no text"):
            return None
        if self._split.printed and (turn.answer in self._unseen) != (
            self._split.printed == "words"
        ):
            return None
        if self._split.slow and not _slow_down(scene):
            return None
        return self._with_notice((scene,), turn)

    def _two(self, options: SceneOptions) -> Asked | None:
        first = self._maker.scene(options)
        if self._split.task == "pair":
            scenes = (first, self._maker.scene(options))
            turn = several_turns(self._maker.rng, scenes, self._caption)[0]
            return Asked(scenes=scenes, turn=turn)
        if (found := edited(self._maker, first)) is None:
            return None
        scenes = (first, found[0])
        turns = difference_turns(self._maker.rng, scenes, found[1])
        return Asked(scenes=scenes, turn=next(t for t in turns if t.task == "difference"))

    def _with_notice(
        self, scenes: tuple[Scene, ...], turn: Turn, tools: tuple[Tool, ...] = ()
    ) -> Asked:
        options = _NOTICES[turn.notice[0]] if turn.notice is not None else {}
        return Asked(scenes=scenes, turn=turn, tools=tools, options=options)

    def _caption(self, items: list[Item]) -> str:
        return caption(items, self._n_names)


def _slow_down(scene: Scene) -> bool:
    """Let the first thing go a shorter way; False where it does not move."""
    if scene.event is None or scene.event.kind in ("appear", "disappear"):
        return False
    start, end = scene.event.path
    scene.event = replace(scene.event, path=(start, start + _SLOW * (end - start)))
    return True
