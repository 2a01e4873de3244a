"""Two pictures that differ in one thing, and questions about them and about several pictures.

An edited scene has the ground of the first one and everything else of it but one change.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from k3vl.demo.grammar import NUMBERS, is_plural, sentence, with_article
from k3vl.demo.places import is_clear, place
from k3vl.demo.turns import Turn

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from k3vl.demo.scene import Item, Scene, SceneMaker

EditKind: TypeAlias = Literal["added", "removed", "moved", "recoloured", "replaced", "same"]
EDITS: tuple[EditKind, ...] = ("added", "removed", "moved", "recoloured", "replaced", "same")
_SHARES = (22, 20, 24, 14, 12, 8)
ORDER = ("first", "second", "third", "fourth")
_DIFFERENCE = (
    "What changed?",
    "What is different?",
    "What is the difference between the two pictures?",
    "What changed between the two pictures?",
    "Compare the two pictures.",
    "Find the difference.",
)
_SAME = "Nothing changed."


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """What happened between two pictures, and the sentence for it."""

    kind: EditKind
    answer: str


def edited(
    maker: SceneMaker, scene: Scene, kind: EditKind | None = None
) -> tuple[Scene, Edit] | None:
    """The scene after a change, or None where this scene does not allow it."""
    rng = maker.rng
    kind = kind or rng.choices(EDITS, _SHARES)[0]
    after = replace(scene, items=[copy(item) for item in scene.items])
    if kind == "same":
        return after, Edit(kind=kind, answer=_SAME)
    if kind == "added":
        if len(after.items) == 6 or (new := maker.another(scene)) is None:
            return None
        after.items.insert(rng.randint(0, len(after.items)), new)
        return after, Edit(kind=kind, answer=_passive(new, "added"))
    if not (single := unique(after.items)):
        return None
    item = rng.choice(single)
    if kind == "removed":
        if len(after.items) == 1:
            return None
        after.items.remove(item)
        return after, Edit(kind=kind, answer=_passive(item, "removed"))
    if kind == "moved":
        return _moved(maker, after, item)
    if kind == "replaced":
        if (new := maker.another(scene)) is None:
            return None
        index = after.items.index(item)
        after.items[index] = replace(new, x=item.x, y=item.y, size=item.size)
        answer = f"{_passive(item, 'replaced')[:-1]} by {with_article(_spoken(new, item))}."
        return after, Edit(kind=kind, answer=answer)
    if item.colour is None or item.tint is None:
        return None
    new = maker.recoloured(scene, item)
    after.items[after.items.index(item)] = new
    answer = f"The {item.name} changed from {item.colour} to {new.colour}."
    return after, Edit(kind=kind, answer=answer)


def _moved(maker: SceneMaker, after: Scene, item: Item) -> tuple[Scene, Edit] | None:
    before = place(item.x, item.y)
    spot = maker.another_place(after, item)
    if spot is None or not is_clear(item.x, item.y) or not is_clear(*spot):
        return None
    item.x, item.y = spot
    if (now := place(*spot)) == before:
        return None
    answer = f"The {item.name} moved from the {before} to the {now}."
    return after, Edit(kind="moved", answer=answer)


def _passive(item: Item, verb: str) -> str:
    be = "were" if is_plural(item.name) else "was"
    return sentence(f"{with_article(item.name)} {be} {verb}")


def _spoken(new: Item, old: Item) -> str:
    return new.name if new.name != old.name else f"another {new.name}"


def unique(items: Sequence[Item]) -> list[Item]:
    """Items whose name occurs once."""
    names = [item.name for item in items]
    return [item for item in items if names.count(item.name) == 1]


# ---------------------------------------------------------------------- questions


def difference_turns(rng: random.Random, scenes: Sequence[Scene], edit: Edit) -> list[Turn]:
    """What changed, and sometimes whether anything did."""
    noted = f"First: {len(scenes[0].items)} things. Second: {len(scenes[1].items)} things."
    out = [Turn("difference", rng.choice(_DIFFERENCE), edit.answer, noted)]
    if rng.random() < 0.3:
        question = rng.choice(("Did anything change?", "Are the two pictures different?"))
        out.append(Turn("differs", question, "No." if edit.kind == "same" else "Yes."))
    rng.shuffle(out)
    return out


def several_turns(
    rng: random.Random, scenes: Sequence[Scene], caption: Callable[[list[Item]], str]
) -> list[Turn]:
    """Questions about two or more unrelated pictures in one message."""
    told = [caption(scene.items) for scene in scenes]
    many = NUMBERS[len(scenes)]
    all_of = " ".join(f"{ORDER[i].capitalize()}: {text}" for i, text in enumerate(told))
    question = rng.choice(
        (
            "Describe both pictures." if many == "two" else f"Describe all {many} pictures.",
            f"What do the {many} pictures show?",
        )
    )
    out = [Turn("pair", question, all_of)]
    which = rng.randrange(len(scenes))
    order = ORDER[which]
    question = rng.choice((f"What is in the {order} picture?", f"Describe the {order} picture."))
    out.append(Turn("pair", question, told[which]))
    others = {i.name for n, scene in enumerate(scenes) if n != which for i in scene.items}
    if alone := [i.name for i in scenes[which].items if i.name not in others]:
        thing = with_article(rng.choice(alone))
        out.append(Turn("which", f"Which picture shows {thing}?", f"The {order}."))
    counts = [len(scene.items) for scene in scenes]
    if counts.count(max(counts)) == 1:
        most = ORDER[counts.index(max(counts))]
        noted = ", ".join(str(n) for n in counts) + "."
        out.append(Turn("which", "Which picture has the most objects?", f"The {most}.", noted))
    rng.shuffle(out)
    return out
