"""Conversations about several pictures and clips, of which each message may bring one.

A question without further words is about what came last; one about something earlier names it
("In the first picture, ..."). Some messages bring nothing and ask on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from k3vl.demo.edits import ORDER, several_turns

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from k3vl.demo.scene import Item, Scene
    from k3vl.demo.turns import Turn

_PAIR_FIRST = 0.2  # of conversations about three things and more begin with two in one message
_ASK_ON = 0.35  # of messages that bring something are followed by one that does not
_MOST_AFTER = 2  # such messages at the end
_BACK, _OVER_ALL = 0.45, 0.2  # of them are about something named, and about all; else the last
# Where the phrase ends, so that "the video game" and "the chart increasing" stay what they are.
_SHOWN = re.compile(
    r"\b(?:the|this) (?:picture|image|video|chart)\b"
    r"(?=[?.,]| (?:and|are|as|have|in|is|shows?|with)\b)"
)
_POINTS = re.compile(r"\b(?:this|here)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """What is said about scenes.

    Attributes:
        brings: how many scenes, in order, each turn's message brings; later turns bring none.
        tools: JSON of the declared tools; "" for none.
    """

    scenes: list[Scene]
    turns: list[Turn]
    brings: tuple[int, ...]
    tools: str = ""


def calls_it(scenes: Sequence[Scene], which: int) -> list[str]:
    """What a scene may be called once all of these were shown: ``first picture``, ``video``."""
    kinds = [_kind(scene) for scene in scenes]
    kind = kinds[which]
    alike = [index for index, other in enumerate(kinds) if other == kind]
    if len(alike) == 1:
        return [kind]
    names = [f"{ORDER[alike.index(which)]} {kind}"]
    if which == len(scenes) - 1:
        names.append(f"last {kind}")
    elif which == len(scenes) - 2 and kinds[-1] == kind:
        names.append(f"previous {kind}")
    return names


def _kind(scene: Scene) -> str:
    if scene.chart is not None:
        return "chart"
    return "video" if scene.frames > 1 else "picture"


def about(turn: Turn, name: str) -> Turn | None:
    """The same question with what it is about named; None where it points at what is seen."""
    question, named = _SHOWN.subn(f"the {name}", turn.question, count=1)
    if not named:
        if _POINTS.search(turn.question):
            return None
        question = f"In the {name}, {turn.question[0].lower()}{turn.question[1:]}"
    return replace(turn, question=question)


class Talker:
    """Makes up conversations.

    Args:
        rng: source of chance.
        ask: a question about one scene, or None where it has none.
        tell: writes captions.
    """

    def __init__(
        self,
        rng: random.Random,
        ask: Callable[[Scene], Turn | None],
        tell: Callable[[list[Item]], str],
    ) -> None:
        self._rng = rng
        self._ask = ask
        self._tell = tell

    def talk(self, scenes: list[Scene], tools: str = "") -> Talk:
        """Two or more messages, each scene in one of them; without turns where one has none."""
        rng = self._rng
        brings = [1] * len(scenes)
        if len(scenes) > 2 and self._comparable(scenes) and rng.random() < _PAIR_FIRST:
            brings[:2] = [2]
        turns: list[Turn] = []
        brought: list[int] = []
        shown = 0
        for number in brings:
            shown += number
            seen = scenes[:shown]
            opening = self._over_all(seen) if number > 1 else self._ask(seen[-1])
            if opening is None:
                return Talk(scenes=scenes, turns=[], brings=())
            last = shown == len(scenes)
            more = rng.randint(0, _MOST_AFTER) if last else rng.random() < _ASK_ON
            asked_on = [turn for turn in (self._on(seen) for _ in range(more)) if turn is not None]
            turns += [opening, *asked_on]
            brought += [number] + [0] * len(asked_on)
        # What ends a conversation may only stand at its end.
        kept = [i for i, t in enumerate(turns) if t.notice is None or i == len(turns) - 1]
        if sum(brought[i] for i in kept) != len(scenes):
            return Talk(scenes=scenes, turns=[], brings=())
        return Talk(
            scenes=scenes,
            turns=[turns[i] for i in kept],
            brings=tuple(brought[i] for i in kept),
            tools=tools,
        )

    def back(self, seen: Sequence[Scene], which: int) -> Turn | None:
        """A question about one of several scenes, which it names."""
        turn = self._ask(seen[which])
        return turn and about(turn, self._rng.choice(calls_it(seen, which)))

    def _on(self, seen: list[Scene]) -> Turn | None:
        """A question of a message that brings nothing."""
        chance = self._rng.random()
        if len(seen) > 1 and chance < _BACK:
            return self.back(seen, self._rng.randrange(len(seen)))
        if len(seen) > 1 and chance < _BACK + _OVER_ALL and self._comparable(seen):
            return self._over_all(seen)
        return self._ask(seen[-1])

    def _over_all(self, seen: Sequence[Scene]) -> Turn:
        return several_turns(self._rng, seen, self._tell)[0]

    def _comparable(self, seen: Sequence[Scene]) -> bool:
        return all(_kind(scene) == "picture" and scene.items for scene in seen)
