"""Questions about scenes and their answers. The answers are canonical, so exact match is fair."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3vl.demo import grammar
from k3vl.demo.grammar import NUMBERS, counted, is_plural, listed, plural, sentence, with_article

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

    from k3vl.demo.scene import Item, Scene, SceneMaker

# Draws per task; "text" and "relation" need more because few scenes allow them or they are learned
# late.
IMAGE_SHARES: Mapping[str, int] = {
    "name": 30,
    "caption": 40,
    "count": 12,
    "total": 5,
    "relation": 22,
    "at": 7,
    "where": 14,
    "yesno": 9,
    "colour": 10,
    "text": 50,
}
_ONCE = ("caption", "name", "text", "total", "video")
_DRAWS = 12

_CAPTION = (
    "Describe the picture.",
    "What is in this image?",
    "Caption this image.",
    "Write a caption.",
    "What do you see?",
    "Describe the image.",
    "Describe this image.",
    "Describe this picture in one sentence.",
    "What is in the picture?",
    "Describe this.",
)
_NAME = (
    "What is this?",
    "Name the object.",
    "What is the object?",
    "What does the picture show?",
    "Which object is this?",
)
_TOTAL = (
    "How many objects are there?",
    "Count all the objects.",
    "How many things are in the picture?",
)
_TEXT = ("Read the text.", "What does the sign say?", "What is written here?", "Which text is it?")
_VIDEO = (
    "What happens in the video?",
    "Describe the video.",
    "What happens here?",
    "Describe this video.",
    "Describe this clip in one sentence.",
    "Describe this.",
)
_EVENT_WORDS = {
    "right": ("moves from left to right", "move from left to right"),
    "left": ("moves from right to left", "move from right to left"),
    "down": ("moves down", "move down"),
    "up": ("moves up", "move up"),
    "appear": ("appears", "appear"),
    "disappear": ("disappears", "disappear"),
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One question with its answer; ``thought`` is what a thinking model may note first."""

    task: str
    question: str
    answer: str
    thought: str = ""


def place(x: float, y: float) -> str:
    """One of nine places: ``top left``, ``left``, ``center``, ..."""
    across = "left" if x < 0.38 else "right" if x > 0.62 else ""
    down = "top" if y < 0.38 else "bottom" if y > 0.62 else ""
    return f"{down} {across}".strip() or "center"


def spoken_name(item: Item, n_names: int) -> str:
    """The name in a caption: shapes carry their colour."""
    return f"{item.colour} {item.name}" if item.label >= n_names else item.name


def caption(items: list[Item], n_names: int) -> str:
    """All things from left to right, equal ones together."""
    ordered = sorted(items, key=lambda item: item.x)
    counts = Counter(spoken_name(item, n_names) for item in ordered)
    return sentence(listed([counted(name, n) for name, n in counts.items()]))


class Questioner:
    """Asks about scenes of one :class:`SceneMaker`, with its chance and its names."""

    def __init__(self, maker: SceneMaker) -> None:
        self._rng: random.Random = maker.rng
        self._names = maker.atlas.names
        self._groups = maker.atlas.groups
        self._pool = maker.pool
        self._by_group: dict[str, list[int]] = {}
        for index in maker.pool:
            self._by_group.setdefault(self._groups[index], []).append(index)

    def turns(self, scene: Scene, limit: int = 4) -> list[Turn]:
        """Up to ``limit`` different questions that the scene allows."""
        rng = self._rng
        if scene.event:
            tasks = ["video", *(["yesno"] if rng.random() < 0.5 else [])]
        else:
            tasks = rng.choices(list(IMAGE_SHARES), list(IMAGE_SHARES.values()), k=_DRAWS)
        out: list[Turn] = []
        for task in tasks:
            if task in _ONCE and any(turn.task == task for turn in out):
                continue
            if turn := self.ask(task, scene):
                out.append(turn)
            if len(out) == limit:
                break
        return out

    def ask(self, task: str, scene: Scene) -> Turn | None:
        """One question of a task, or None where the scene does not allow it."""
        found: Turn | None = getattr(self, f"_{task}")(scene)
        return found

    # ------------------------------------------------------------------ whole picture

    def _caption(self, scene: Scene) -> Turn:
        text = caption(scene.items, len(self._names))
        thought = ", ".join(
            spoken_name(i, len(self._names)) for i in sorted(scene.items, key=lambda i: i.x)
        )
        return Turn("caption", self._rng.choice(_CAPTION), text, f"Left to right: {thought}.")

    def _name(self, scene: Scene) -> Turn | None:
        if len(scene.items) != 1 or scene.items[0].label >= len(self._names):
            return None
        answer = sentence(with_article(scene.items[0].name))
        return Turn("name", self._rng.choice(_NAME), answer)

    def _total(self, scene: Scene) -> Turn:
        answer = sentence(NUMBERS[len(scene.items)])
        thought = f"{', '.join(item.name for item in scene.items)}."
        return Turn("total", self._rng.choice(_TOTAL), answer, thought)

    def _text(self, scene: Scene) -> Turn | None:
        if scene.strip is None:
            return None
        return Turn("text", self._rng.choice(_TEXT), scene.strip.text)

    def _video(self, scene: Scene) -> Turn | None:
        if scene.event is None:
            return None
        name = scene.items[0].name
        verb = _EVENT_WORDS[scene.event.kind][is_plural(name)]
        answer = sentence(f"{with_article(name)} {verb}")
        return Turn("video", self._rng.choice(_VIDEO), answer)

    # ------------------------------------------------------------------ one thing

    def _count(self, scene: Scene) -> Turn | None:
        rng = self._rng
        names = Counter(item.name for item in scene.items)
        asked = rng.choice(list(names.elements()))
        if rng.random() < 0.1:
            asked = self._names[rng.choice(self._pool)]
        if not grammar.countable(asked):
            return None
        many = plural(asked)
        question = rng.choice(
            (f"How many {many} are there?", f"Count the {many}.", f"How many {many} do you see?")
        )
        thought = f"{', '.join(item.name for item in scene.items)}."
        return Turn("count", question, sentence(NUMBERS[names[asked]]), thought)

    def _relation(self, scene: Scene) -> Turn | None:
        rng = self._rng
        single = self._single(scene)
        if len(single) < 2:
            return None
        a, b = rng.sample(single, 2)
        dx, dy = a.x - b.x, a.y - b.y
        if abs(abs(dx) - abs(dy)) < 0.08:
            return None  # diagonal: both answers would be right
        if abs(dx) > abs(dy):
            relation = "left of" if dx < 0 else "right of"
        else:
            relation = "above" if dy < 0 else "below"
        be = "are" if is_plural(a.name) else "is"
        question = rng.choice(
            (
                f"Where {be} the {a.name} relative to the {b.name}?",
                f"Where {be} the {a.name}, seen from the {b.name}?",
            )
        )
        return Turn("relation", question, f"The {a.name} {be} {relation} the {b.name}.")

    def _at(self, scene: Scene) -> Turn | None:
        if len(scene.items) < 2:
            return None
        places = [place(item.x, item.y) for item in scene.items]
        possible = [
            i
            for i, item in enumerate(scene.items)
            if places.count(places[i]) == 1 and item.label < len(self._names)
        ]
        if not possible:
            return None
        i = self._rng.choice(possible)
        question = self._rng.choice(
            (f"What is at the {places[i]}?", f"Which object is at the {places[i]} of the picture?")
        )
        return Turn("at", question, sentence(with_article(scene.items[i].name)))

    def _where(self, scene: Scene) -> Turn | None:
        if not (single := self._single(scene)):
            return None
        item = self._rng.choice(single)
        be = "are" if is_plural(item.name) else "is"
        question = f"In which part of the picture {be} the {item.name}?"
        return Turn("where", question, sentence(place(item.x, item.y)))

    def _yesno(self, scene: Scene) -> Turn:
        rng = self._rng
        names = [item.name for item in scene.items]
        if rng.random() < 0.5:
            asked = rng.choice(names)
        else:  # half of the absent ones come from the same group as a present one
            label = rng.choice(scene.items).label
            group = self._groups[label] if label < len(self._names) else ""
            near = self._by_group.get(group, self._pool)
            asked = self._names[rng.choice(near if rng.random() < 0.5 else self._pool)]
        thing = with_article(asked)
        seen = "video" if scene.event else "picture"
        be = "Are" if is_plural(asked) else "Is"
        question = rng.choice(
            (
                f"{be} there {thing} in the {seen}?",
                f"Do you see {thing}?",
                f"Does the {'video' if scene.event else 'image'} show {thing}?",
            )
        )
        return Turn("yesno", question, "Yes." if asked in names else "No.")

    def _colour(self, scene: Scene) -> Turn | None:
        coloured = [item for item in self._single(scene) if item.colour]
        if not coloured:
            return None
        item = self._rng.choice(coloured)
        be, does = ("are", "do") if is_plural(item.name) else ("is", "does")
        question = self._rng.choice(
            (
                f"What colour {be} the {item.name}?",
                f"Which colour {does} the {item.name} have?",
                f"What color {be} the {item.name}?",
            )
        )
        return Turn("colour", question, sentence(str(item.colour)))

    @staticmethod
    def _single(scene: Scene) -> list[Item]:
        """Items whose name occurs once."""
        counts = Counter(item.name for item in scene.items)
        return [item for item in scene.items if counts[item.name] == 1]


def pair_turns(rng: random.Random, scenes: tuple[Scene, Scene], n_names: int) -> list[Turn]:
    """Questions about two pictures in one message."""
    first, second = (caption(scene.items, n_names) for scene in scenes)
    out = [
        Turn(
            "pair",
            rng.choice(("Describe both pictures.", "What do the two pictures show?")),
            f"First: {first} Second: {second}",
        )
    ]
    which = rng.randrange(2)
    order = ("first", "second")[which]
    out.append(
        Turn(
            "pair",
            rng.choice((f"What is in the {order} picture?", f"Describe the {order} picture.")),
            (first, second)[which],
        )
    )
    only = [i.name for i in scenes[which].items]
    other = {i.name for i in scenes[1 - which].items}
    alone = [name for name in only if name not in other]
    if alone:
        thing = with_article(rng.choice(alone))
        out.append(Turn("pair", f"Which picture shows {thing}?", f"The {order}."))
    rng.shuffle(out)
    return out
