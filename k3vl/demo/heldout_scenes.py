"""Scenes and questions of held-out splits, without end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise, permutations, product
from typing import TYPE_CHECKING, Any

from k3vl.demo.atlas import TRAIN
from k3vl.demo.charts import random_chart
from k3vl.demo.clips import group_times
from k3vl.demo.edits import difference_turns, edited, several_turns
from k3vl.demo.places import is_apart
from k3vl.demo.scene import CHESSBOARD, Ground, Scene, SceneMaker, SceneOptions
from k3vl.demo.talks import about, calls_it
from k3vl.demo.tasks import Questioner, caption
from k3vl.demo.tool_tasks import random_tool, tool_turn
from k3vl.demo.words import word_list

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from k3vl.demo.atlas import Atlas
    from k3vl.demo.scene import Item
    from k3vl.demo.tool_tasks import Tool, ToolKind
    from k3vl.demo.turns import Turn

FILE_RATE = 24
"""Frames a second of the clips; the shipped configuration looks at two of them."""

_SLOW = 0.3  # of the way; training never moves a thing by less than half of it
_PAPER = Ground(kind=0, first=CHESSBOARD[0], second=CHESSBOARD[1], angle=0.0)
_SIDE = 224
_IN_ORDER = ("caption", "five", "json", "tool", "pair")  # tasks that list things from the left
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
        tools: so many are declared, where one is to be called.
        earlier: messages with a picture or clip of their own that come before.
        back: the question brings nothing; it is about something earlier, which it names.
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
    tools: int = 1
    earlier: int = 0
    back: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    suffix: str = ".png"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question about one or several scenes.

    Attributes:
        history: turns before it, each with the next scene; the question brings the rest.
        also: the question with answers that are as right: where two things lie one above the
            other, either may be named first.
        tools: what is declared with it.
        options: chat options beside the split's.
    """

    scenes: tuple[Scene, ...]
    turn: Turn
    history: tuple[Turn, ...] = ()
    also: tuple[Turn, ...] = ()
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
        task = self._split.task
        if self._split.earlier:
            return self._later(options)
        if task == "difference":
            return self._difference(options)
        if task == "pair":
            return self._pair(options)
        scene = self._scene(options)
        if task == "tool":
            return self._call(scene)
        turn, also = self._told((scene,), lambda scenes: self._questions.ask(task, scenes[0]))
        if turn is None or turn.answer.startswith("There is no text"):
            return None
        if self._split.printed and (turn.answer in self._unseen) != (
            self._split.printed == "words"
        ):
            return None
        if self._split.slow and not _slow_down(scene):
            return None
        return self._with_notice((scene,), turn, also=also)

    def _scene(self, options: SceneOptions) -> Scene:
        if self._split.task == "chart":
            return Scene(ground=_PAPER, items=[], chart=random_chart(self._maker.rng))
        scene = self._maker.scene(options)
        if scene.frames > 1:
            scene.times = group_times(FILE_RATE, scene.frames)
        return scene

    def _call(self, scene: Scene) -> Asked | None:
        rng = self._maker.rng
        kinds: list[ToolKind] = ["count", "caption", "tags", "log"]
        tool = random_tool(rng, rng.choice(kinds))
        kinds.remove(tool.kind)
        others = [random_tool(rng, kind) for kind in rng.sample(kinds, self._split.tools - 1)]
        turn, also = self._told(
            (scene,), lambda scenes: tool_turn(rng, scenes[0], tool, self._caption)
        )
        if turn is None:
            return None
        declared = [tool, *others]
        if others:
            rng.shuffle(declared)
        return self._with_notice((scene,), turn, tuple(declared), also)

    def _later(self, options: SceneOptions) -> Asked | None:
        """After other pictures: about a new one, or back to one of them."""
        rng, split = self._maker.rng, self._split
        before = [self._scene(options) for _ in range(rng.randint(1 + split.back, split.earlier))]
        scenes = (*before, *([] if split.back else [self._scene(options)]))
        history = [next(iter(self._questions.turns(scene, 1)), None) for scene in before]
        which = rng.randrange(len(scenes) - 1) if split.back else len(scenes) - 1

        def ask(shown: Sequence[Scene]) -> Turn | None:
            turn = self._questions.ask(split.task, shown[which])
            if turn is None or not split.back:
                return turn
            return about(turn, rng.choice(calls_it(shown, which)))

        turn, also = self._told(scenes, ask)
        told = tuple(earlier for earlier in history if earlier is not None and not earlier.notice)
        if turn is None or len(told) < len(before):
            return None
        return Asked(scenes=scenes, turn=turn, history=told, also=also)

    def _pair(self, options: SceneOptions) -> Asked:
        scenes = (self._maker.scene(options), self._maker.scene(options))
        rng = self._maker.rng
        turn, also = self._told(scenes, lambda both: several_turns(rng, both, self._caption)[0])
        assert turn is not None, "there is always something to ask"
        return Asked(scenes=scenes, turn=turn, also=also)

    def _difference(self, options: SceneOptions) -> Asked | None:
        first = self._maker.scene(options)
        if (found := edited(self._maker, first)) is None:
            return None
        scenes = (first, found[0])
        turns = difference_turns(self._maker.rng, scenes, found[1])
        return Asked(scenes=scenes, turn=next(t for t in turns if t.task == "difference"))

    def _told(
        self, scenes: tuple[Scene, ...], ask: Callable[[Sequence[Scene]], Turn | None]
    ) -> tuple[Turn | None, tuple[Turn, ...]]:
        """The question, and the same one with every other right order of what it lists."""
        rng = self._maker.rng
        before = rng.getstate()
        turn = ask(scenes)
        if turn is None or turn.task not in _IN_ORDER:
            return turn, ()
        after = rng.getstate()
        told = {(turn.answer, repr(turn.calls)): turn}
        for others in product(*(_orders(scene) for scene in scenes)):
            rng.setstate(before)  # the same question
            other = ask(others)
            if other is not None and other.question == turn.question:
                told.setdefault((other.answer, repr(other.calls)), other)
        rng.setstate(after)
        return turn, tuple(told.values())[1:]

    def _with_notice(
        self,
        scenes: tuple[Scene, ...],
        turn: Turn,
        tools: tuple[Tool, ...] = (),
        also: tuple[Turn, ...] = (),
    ) -> Asked:
        options = _NOTICES[turn.notice[0]] if turn.notice is not None else {}
        return Asked(scenes=scenes, turn=turn, also=also, tools=tools, options=options)

    def _caption(self, items: list[Item]) -> str:
        return caption(items, self._n_names)


def _orders(scene: Scene) -> list[Scene]:
    """The scene, and it with things that lie one above the other exchanged from left to right."""
    items = sorted(scene.items, key=lambda item: item.x)
    places = [item.x for item in items]
    if all(is_apart(a, b) for a, b in pairwise(places)):
        return [scene]
    out = []
    for chosen in permutations(items):
        turned = [(a.x, b.x) for a, b in combinations(chosen, 2) if a.x > b.x]
        if not any(is_apart(a, b) for a, b in turned):
            moved = [replace(item, x=x) for item, x in zip(chosen, places, strict=True)]
            out.append(replace(scene, items=moved))
    return out


def _slow_down(scene: Scene) -> bool:
    """Let the first thing go a shorter way; False where it does not move."""
    if scene.event is None or scene.event.kind in ("appear", "disappear"):
        return False
    start, end = scene.event.path
    scene.event = replace(scene.event, path=(start, start + _SLOW * (end - start)))
    return True
