"""Tool calls in K3's format: a handful of simple tools, each under several names.

A declaration is drawn at random from synonyms, so the names, argument names and types must be read
from it. What a tool returns is taken over into the answer.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from k3vl.demo.grammar import countable, plural
from k3vl.demo.turns import Call, Turn
from k3vl.xtml.values import sorted_json
from k3vl.xtml.wording import TOOL_CHOICES

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from k3vl.demo.scene import Item, Scene

ToolKind = Literal["count", "caption", "tags", "log"]

_NAMES: dict[ToolKind, tuple[str, ...]] = {
    "count": ("count_objects", "count_things", "object_counter", "get_count"),
    "caption": ("save_caption", "store_caption", "set_caption", "add_caption"),
    "tags": ("tag_image", "save_tags", "set_tags", "add_labels"),
    "log": ("log_count", "record_count", "save_count", "report_count"),
}
_TEXTS: dict[ToolKind, tuple[str, ...]] = {
    "count": ("Count objects of one kind.", "Counts the objects with a name in the picture."),
    "caption": ("Save a caption of the picture.", "Stores a description of the image."),
    "tags": ("Save the names of the objects.", "Stores labels for the picture."),
    "log": ("Record how many objects there are.", "Saves the number of objects of one kind."),
}
_THING, _TEXT = ("name", "object", "thing"), ("text", "caption", "description")
_LIST, _NUMBER = ("tags", "names", "labels", "objects"), ("count", "number", "amount")
_ASK: dict[ToolKind, tuple[str, ...]] = {
    "caption": (
        "Save a caption of this picture.",
        "Describe the picture and save it with the tool.",
        "Store a description of this image.",
        "Write a caption and save it.",
    ),
    "tags": (
        "Tag this picture.",
        "Save the names of all objects.",
        "Label the picture with the tool.",
        "Add labels for everything you see.",
    ),
}
REQUIRED = ("tool-choice", TOOL_CHOICES["required"])
FORBIDDEN = ("tool-choice", TOOL_CHOICES["none"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A declared tool; ``arguments`` are the names under which its values are passed."""

    kind: ToolKind
    name: str
    text: str
    arguments: tuple[str, ...]

    def declaration(self) -> dict[str, Any]:
        """JSON as a client sends it."""
        types: dict[ToolKind, tuple[dict[str, Any], ...]] = {
            "count": ({"type": "string"},),
            "caption": ({"type": "string"},),
            "tags": ({"type": "array", "items": {"type": "string"}},),
            "log": ({"type": "string"}, {"type": "number"}),
        }
        properties = dict(zip(self.arguments, types[self.kind], strict=True))
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.text,
                "parameters": {
                    "type": "object",
                    "properties": properties,
                    "required": list(self.arguments),
                },
            },
        }


def random_tool(rng: random.Random, kind: ToolKind) -> Tool:
    """One of the spellings of a tool."""
    arguments: dict[ToolKind, tuple[tuple[str, ...], ...]] = {
        "count": (_THING,),
        "caption": (_TEXT,),
        "tags": (_LIST,),
        "log": (_THING, _NUMBER),
    }
    first = rng.random() < 0.3  # the plain spelling more often than the others
    return Tool(
        kind=kind,
        name=_NAMES[kind][0] if first else rng.choice(_NAMES[kind]),
        text=rng.choice(_TEXTS[kind]),
        arguments=tuple(a[0] if first else rng.choice(a) for a in arguments[kind]),
    )


def random_tools(rng: random.Random) -> list[Tool]:
    """One to three tools of different kinds."""
    kinds: list[ToolKind] = list(_NAMES)
    return [random_tool(rng, kind) for kind in rng.sample(kinds, rng.choice((1, 2, 2, 3)))]


def declare(tools: Sequence[Tool]) -> str:
    """The list of declarations as the template writes it: compact, keys sorted."""
    return sorted_json([tool.declaration() for tool in tools])


def tool_turn(
    rng: random.Random, scene: Scene, tool: Tool, caption: Callable[[list[Item]], str]
) -> Turn | None:
    """A request for one call of ``tool``, with its result and the answer after it."""
    names = [item.name for item in sorted(scene.items, key=lambda item: item.x)]
    if not names:
        return None
    thing = rng.choice(names)
    number = Counter(names)[thing]
    values: tuple[Any, ...]
    result, answer = rng.choice((("ok", "Saved."), ('{"saved": true}', "Saved.")))
    if tool.kind in ("count", "log"):
        if not countable(thing):
            return None
        many = plural(thing)
        if tool.kind == "count":
            told = number if rng.random() < 0.7 else rng.randint(0, 20)  # the tool is believed
            question = rng.choice(
                (
                    f"Count the {many} with the tool.",
                    f"Use the tool to count the {many}.",
                    f"Call the tool to find out how many {many} there are.",
                )
            )
            result = rng.choice((str(told), json.dumps({"count": told})))
            values, answer = (thing,), f"The tool counted {told}."
        else:
            question = rng.choice(
                (
                    f"Record how many {many} there are.",
                    f"Count the {many} and save the number.",
                    f"Log the number of {many}.",
                )
            )
            values = (thing, number)
    else:
        question = rng.choice(_ASK[tool.kind])
        values = (caption(scene.items),) if tool.kind == "caption" else (names,)
    call = Call(tool.name, dict(zip(tool.arguments, values, strict=True)))
    thought = f"I call {tool.name}."
    if rng.random() < 0.25:  # the client has not answered yet
        notice = REQUIRED if rng.random() < 0.4 else None
        return Turn("tool", question, "", thought, calls=(call,), notice=notice)
    return Turn("tool", question, answer, thought, calls=(call,), results=(result,))


def tool_rows(
    rng: random.Random, scene: Scene, caption: Callable[[list[Item]], str], plain: list[Turn]
) -> tuple[list[Turn], str]:
    """Turns with tools declared, and the declarations; some turns need no tool.

    Args:
        rng: source of chance.
        scene: what the picture shows.
        caption: writes captions.
        plain: ordinary questions about the scene.
    """
    declared = random_tools(rng)
    turns: list[Turn] = []
    if rng.random() < 0.75 and (turn := tool_turn(rng, scene, rng.choice(declared), caption)):
        turns.append(turn)
    open_end = any(turn.calls and not turn.results for turn in turns)
    if not turns and plain and rng.random() < 0.3:
        first = plain[0]
        plain = [Turn(first.task, first.question, first.answer, first.thought, notice=FORBIDDEN)]
    if not open_end:
        turns = [*turns, *plain[: 1 if turns else 2]]
        if rng.random() < 0.5:
            turns.reverse()
    return turns, declare(declared)
