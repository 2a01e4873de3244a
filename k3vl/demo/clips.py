"""Questions about clips: what happens, in which order, and when.

A clip reaches the model in groups of four frames, each behind its timestamp; the time of an event
is the timestamp of the group in which it is first seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from k3vl.demo.grammar import is_plural, sentence, with_article
from k3vl.demo.scene import GROUP
from k3vl.demo.turns import Turn

if TYPE_CHECKING:
    import random

    from k3vl.demo.scene import Event, Item, Scene

SAMPLE_FPS = 2.0
"""Frames a second that the shipped media configuration looks at."""

_WHOLE = (
    "What happens in the video?",
    "Describe the video.",
    "What happens here?",
    "Describe this video.",
    "Describe this clip in one sentence.",
    "Describe this.",
)
_WORDS = {
    "right": ("moves from left to right", "move from left to right"),
    "left": ("moves from right to left", "move from right to left"),
    "down": ("moves down", "move down"),
    "up": ("moves up", "move up"),
    "appear": ("appears", "appear"),
    "disappear": ("disappears", "disappear"),
}


def clip_times(rate: float, frames: int) -> list[float]:
    """Seconds of the frames that the processor picks from a file of this rate.

    The file is as long as it must be for ``frames`` of them: ``round(n * fps / rate)`` frames are
    looked at, evenly spread from the first to the last.
    """
    fps = min(SAMPLE_FPS, rate)
    length = round(frames * rate / fps)
    return [int(i) / rate for i in np.round(np.linspace(0, length - 1, frames))]


def timestamp(seconds: float) -> str:
    """``hh:mm:ss.fff``; the milliseconds are cut from the fraction, as K3's processor does."""
    whole = int(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours % 24:02d}:{minutes:02d}:{rest:02d}.{int((seconds - whole) * 1000):03d}"


def group_times(rate: float, frames: int) -> tuple[str, ...]:
    """The timestamps of a clip's groups in a file of ``rate`` frames a second."""
    return tuple(timestamp(seconds) for seconds in clip_times(rate, frames)[::GROUP])


def clause(item: Item, event: Event) -> str:
    """``a fox appears``."""
    verb = _WORDS[event.kind][is_plural(item.name)]
    return f"{with_article(item.name)} {verb}"


def _events(scene: Scene) -> list[tuple[Item, Event]]:
    found = zip(scene.items, (scene.event, scene.later), strict=False)
    return [(item, event) for item, event in found if event is not None]


def video_turn(rng: random.Random, scene: Scene) -> Turn | None:
    """What happens in the clip as a whole."""
    told = [clause(item, event) for item, event in _events(scene)]
    if not told:
        return None
    question = rng.choice(_WHOLE)
    if len(told) == 1:
        return Turn("video", question, sentence(told[0]))
    answer = sentence(f"first {told[0]}, then {told[1]}")
    return Turn("order", question, answer, _noted(scene))


def order_turn(rng: random.Random, scene: Scene) -> Turn | None:
    """Which of two events comes first or last."""
    told = [clause(item, event) for item, event in _events(scene)]
    if len(told) < 2:
        return None
    which = rng.randrange(2)
    word = ("first", "last")[which]
    question = rng.choice((f"What happens {word}?", f"What happens {word} in the video?"))
    return Turn("order", question, sentence(told[which]), _noted(scene))


def when_turn(rng: random.Random, scene: Scene) -> Turn | None:
    """When something appears or disappears."""
    possible = [
        (item, event)
        for item, event in _events(scene)
        if event.kind in ("appear", "disappear") and scene.times
    ]
    if not possible:
        return None
    item, event = rng.choice(possible)
    do = "do" if is_plural(item.name) else "does"
    question = rng.choice(
        (
            f"When {do} the {item.name} {event.kind}?",
            f"At what time {do} the {item.name} {event.kind}?",
        )
    )
    return Turn("when", question, f"At {scene.times[event.frame // GROUP]}.", _noted(scene))


def does_turn(rng: random.Random, scene: Scene) -> Turn | None:
    """Whether something moves, appears or disappears."""
    events = _events(scene)
    if not events:
        return None
    item, event = rng.choice(events)
    moves = event.kind not in ("appear", "disappear")
    kind = "move" if moves else event.kind
    asked = rng.choice((kind, rng.choice(("move", "appear", "disappear"))))
    do = "Do" if is_plural(item.name) else "Does"
    return Turn("does", f"{do} the {item.name} {asked}?", "Yes." if asked == kind else "No.")


def _noted(scene: Scene) -> str:
    """A thinking model's note: every event with its time."""
    return " ".join(
        f"{scene.times[event.frame // GROUP]}: {item.name} {event.kind}."
        for item, event in _events(scene)
        if event.kind in ("appear", "disappear") and scene.times
    )
