"""Questions about scenes and their answers. The answers are canonical, so exact match is fair."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from k3vl.demo import clips, forms, grammar
from k3vl.demo.charts import chart_turn
from k3vl.demo.edits import unique
from k3vl.demo.grammar import NUMBERS, counted, is_plural, listed, plural, sentence, with_article
from k3vl.demo.places import is_clear, place
from k3vl.demo.turns import Turn

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
    "text": 44,
    "digits": 44,
    "word": 6,
    "five": 5,
    "json": 8,
    "number": 4,
    "absent": 6,
}
CLIP_SHARES: Mapping[str, int] = {
    "video": 30,
    "order": 20,
    "when": 24,
    "does": 8,
    "yesno": 9,
    "absent": 2,
}
_ONCE = ("caption", "name", "text", "digits", "total", "video", "word", "five")
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
_DIGITS = (
    "Read the number.",
    "Which number is it?",
    "What number is written here?",
    "What is the number?",
)
_NOTHING = "I do not see any object."
_NO_TEXT = "There is no text."
_NO_TEXT_SHARE = 0.04


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
        if scene.chart is not None:
            made = [chart_turn(rng, scene.chart) for _ in range(limit)]
            return list({turn.question: turn for turn in made}.values())
        shares = CLIP_SHARES if scene.frames > 1 else IMAGE_SHARES
        tasks = rng.choices(list(shares), list(shares.values()), k=_DRAWS)
        out: list[Turn] = []
        for task in tasks:
            if task in _ONCE and any(turn.task == task for turn in out):
                continue
            turn = self.ask(task, scene)
            if turn and all(turn.question != other.question for other in out):
                out.append(turn)
            if len(out) == limit:
                break
        return out

    def ask(self, task: str, scene: Scene) -> Turn | None:
        """One question of a task, or None where the scene does not allow it."""
        found: Turn | None = getattr(self, f"_{task}")(scene)
        return found

    # ------------------------------------------------------------------ whole picture

    def _chart(self, scene: Scene) -> Turn | None:
        return chart_turn(self._rng, scene.chart) if scene.chart is not None else None

    def _caption(self, scene: Scene) -> Turn:
        if not scene.items:
            return Turn("caption", self._rng.choice(_CAPTION), _NOTHING)
        text = caption(scene.items, len(self._names))
        thought = ", ".join(
            spoken_name(i, len(self._names)) for i in sorted(scene.items, key=lambda i: i.x)
        )
        return Turn("caption", self._rng.choice(_CAPTION), text, f"Left to right: {thought}.")

    def _name(self, scene: Scene) -> Turn | None:
        if not scene.items:
            return Turn("name", self._rng.choice(_NAME), _NOTHING)
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
            return self._no_text()
        return Turn("text", self._rng.choice(_TEXT), scene.strip.text)

    def _no_text(self) -> Turn | None:
        """Many scenes have no text; few of them are asked about it."""
        if self._rng.random() > _NO_TEXT_SHARE:
            return None
        return Turn("text", self._rng.choice(_TEXT), _NO_TEXT)

    def _digits(self, scene: Scene) -> Turn | None:
        if scene.strip is None or not scene.strip.text.isdigit():
            return None
        return Turn("digits", self._rng.choice(_DIGITS), f"{scene.strip.text}.")

    # ------------------------------------------------------------------ clips

    def _video(self, scene: Scene) -> Turn | None:
        return clips.video_turn(self._rng, scene)

    def _order(self, scene: Scene) -> Turn | None:
        return clips.order_turn(self._rng, scene)

    def _when(self, scene: Scene) -> Turn | None:
        return clips.when_turn(self._rng, scene)

    def _does(self, scene: Scene) -> Turn | None:
        return clips.does_turn(self._rng, scene)

    # ------------------------------------------------------------------ form

    def _word(self, scene: Scene) -> Turn | None:
        return forms.word_turn(self._rng, scene)

    def _five(self, scene: Scene) -> Turn | None:
        return forms.five_turn(self._rng, scene)

    def _json(self, scene: Scene) -> Turn | None:
        return forms.json_turn(self._rng, scene)

    def _number(self, scene: Scene) -> Turn | None:
        asked = self._counted(scene)
        return forms.number_turn(self._rng, scene.items, asked) if asked else None

    def _absent(self, scene: Scene) -> Turn | None:
        asked = self._not_there(scene)
        return (
            None
            if asked in {item.name for item in scene.items}
            else forms.absent_turn(self._rng, asked)
        )

    # ------------------------------------------------------------------ one thing

    def _count(self, scene: Scene) -> Turn | None:
        rng = self._rng
        names = Counter(item.name for item in scene.items)
        if not (asked := self._counted(scene)):
            return None
        many = plural(asked)
        question = rng.choice(
            (f"How many {many} are there?", f"Count the {many}.", f"How many {many} do you see?")
        )
        thought = f"{', '.join(item.name for item in scene.items)}."
        return Turn("count", question, sentence(NUMBERS[names[asked]]), thought)

    def _counted(self, scene: Scene) -> str | None:
        """What may be counted: mostly what occurs several times, sometimes what is not there."""
        rng = self._rng
        names = Counter(item.name for item in scene.items)
        asked = self._names[rng.choice(self._pool)]
        if names and rng.random() > 0.12:
            several = [name for name, n in names.items() if n > 1]
            asked = rng.choice(several if several and rng.random() < 0.8 else list(names))
        return asked if grammar.countable(asked) else None

    def _relation(self, scene: Scene) -> Turn | None:
        rng = self._rng
        single = unique(scene.items)
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
        noted = f"{a.name}: {place(a.x, a.y)}. {b.name}: {place(b.x, b.y)}."
        return Turn("relation", question, f"The {a.name} {be} {relation} the {b.name}.", noted)

    def _at(self, scene: Scene) -> Turn | None:
        if len(scene.items) < 2:
            return None
        places = [place(item.x, item.y) for item in scene.items]
        possible = [
            i
            for i, item in enumerate(scene.items)
            if places.count(places[i]) == 1
            and item.label < len(self._names)
            and is_clear(item.x, item.y)
        ]
        if not possible:
            return None
        i = self._rng.choice(possible)
        question = self._rng.choice(
            (f"What is at the {places[i]}?", f"Which object is at the {places[i]} of the picture?")
        )
        return Turn("at", question, sentence(with_article(scene.items[i].name)))

    def _where(self, scene: Scene) -> Turn | None:
        single = [item for item in unique(scene.items) if is_clear(item.x, item.y)]
        if not single:
            return None
        item = self._rng.choice(single)
        be = "are" if is_plural(item.name) else "is"
        question = f"In which part of the picture {be} the {item.name}?"
        return Turn("where", question, sentence(place(item.x, item.y)))

    def _yesno(self, scene: Scene) -> Turn:
        rng = self._rng
        names = [item.name for item in scene.items]
        asked = rng.choice(names) if names and rng.random() < 0.5 else self._not_there(scene)
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

    def _not_there(self, scene: Scene) -> str:
        """A name that is hardly there; half of them come from the group of a present one."""
        rng = self._rng
        near = self._pool
        if scene.items:
            label = rng.choice(scene.items).label
            group = self._groups[label] if label < len(self._names) else ""
            near = self._by_group.get(group, self._pool)
        return self._names[rng.choice(near if rng.random() < 0.5 else self._pool)]

    def _colour(self, scene: Scene) -> Turn | None:
        coloured = [item for item in unique(scene.items) if item.colour]
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
