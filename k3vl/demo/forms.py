"""Questions that ask for a form of answer: one word, few words, JSON, a refusal to guess."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from k3vl.demo.grammar import is_plural, listed, plural, with_article
from k3vl.demo.turns import Turn
from k3vl.xtml.wording import JSON_OBJECT

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from k3vl.demo.scene import Item, Scene

JSON_OBJECT_NOTICE = ("response-format", JSON_OBJECT)
_ONE_WORD = ("Answer in one word.", "One word only.", "Use one word.", "Reply with a single word.")
_FIVE = (
    "Describe the picture in at most five words.",
    "Describe this in at most five words.",
    "What do you see? At most five words.",
    "Caption this in five words or fewer.",
)
_LIST = (
    "List the objects as a JSON list.",
    "Give the names of all objects as a JSON array.",
    "Answer with a JSON list of the objects.",
    "Which objects are there? Answer as a JSON list.",
)
_COUNTS = (
    "Count the objects as a JSON object.",
    "How many of each object are there? Answer as JSON.",
    "Give the objects and their counts as JSON.",
)
_FIVE_WORDS = 5


def word_turn(rng: random.Random, scene: Scene) -> Turn | None:
    """The name of the one object, if it is a single word."""
    if len(scene.items) != 1 or " " in scene.items[0].name:
        return None
    ask = rng.choice(("What is this?", "Name the object.", "Which object is this?"))
    name = scene.items[0].name
    return Turn("word", f"{ask} {rng.choice(_ONE_WORD)}", f"{name[0].upper()}{name[1:]}.")


def five_turn(rng: random.Random, scene: Scene) -> Turn | None:
    """A caption without articles, if it has five words or fewer."""
    names = [item.name for item in sorted(scene.items, key=lambda item: item.x)]
    if not names or len(set(names)) != len(names):
        return None
    text = listed(names)
    if len(text.split()) > _FIVE_WORDS:
        return None
    return Turn("five", rng.choice(_FIVE), f"{text[0].upper()}{text[1:]}.")


def json_turn(rng: random.Random, scene: Scene) -> Turn | None:
    """Names from left to right as a list, or counts of names as an object."""
    names = [item.name for item in sorted(scene.items, key=lambda item: item.x)]
    thought = ", ".join(names) + "."
    if rng.random() < 0.5:
        return Turn("json", rng.choice(_LIST), _json(names), thought)
    notice = JSON_OBJECT_NOTICE if rng.random() < 0.3 else None
    return Turn("json", rng.choice(_COUNTS), _json(Counter(names)), thought, notice=notice)


def _json(value: Any) -> str:
    """As K3's template writes JSON: letters beyond ASCII stay what they are."""
    return json.dumps(value, ensure_ascii=False)


def number_turn(rng: random.Random, items: Sequence[Item], asked: str) -> Turn:
    """A count in digits."""
    count = sum(item.name == asked for item in items)
    tail = rng.choice(("Answer with a number.", "Answer in digits.", "Reply with a number only."))
    return Turn("number", f"How many {plural(asked)} are there? {tail}", str(count))


def absent_turn(rng: random.Random, asked: str) -> Turn:
    """A question about something that is not there."""
    be = "are" if is_plural(asked) else "is"
    question = rng.choice(
        (
            f"In which part of the picture {be} the {asked}?",
            f"What colour {be} the {asked}?",
            f"Where {be} the {asked}?",
            f"What color {be} the {asked}?",
        )
    )
    return Turn("absent", question, f"I do not see {with_article(asked)}.")
