"""English for the names of the closed world: articles, plurals, numbers, loose names.

The names are emoji names (Unicode CLDR). Most are countable nouns; the tables below hold the rest:
plural-only names ("goggles"), names without an article ("popcorn", "mount fuji") and names with a
definite one ("the milky way").
"""

from __future__ import annotations

import re

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

PLURAL_ONLY = frozenset(
    [
        "admission tickets",
        "ballet shoes",
        "beans",
        "blueberries",
        "bookmark tabs",
        "books",
        "briefs",
        "bubbles",
        "card index dividers",
        "chains",
        "cherries",
        "chopsticks",
        "clinking beer mugs",
        "clinking glasses",
        "control knobs",
        "crossed swords",
        "film frames",
        "fireworks",
        "flower playing cards",
        "french fries",
        "glasses",
        "gloves",
        "goggles",
        "grapes",
        "hot springs",
        "houses",
        "japanese dolls",
        "jeans",
        "linked paperclips",
        "maracas",
        "musical notes",
        "nesting dolls",
        "pancakes",
        "paw prints",
        "peanuts",
        "performing arts",
        "prayer beads",
        "scissors",
        "shopping bags",
        "shorts",
        "skis",
        "socks",
        "sparkles",
        "sunglasses",
        "woman's clothes",
    ]
)
"""Names that are plural already."""

WITHOUT_ARTICLE = frozenset(
    [
        "bacon",
        "badminton",
        "baguette bread",
        "bowling",
        "bread",
        "building construction",
        "butter",
        "camping",
        "canned food",
        "construction",
        "cooked rice",
        "cooking",
        "coral",
        "curry rice",
        "dna",
        "field hockey",
        "fire",
        "fog",
        "foggy",
        "garlic",
        "ginger root",
        "high voltage",
        "ice",
        "ice cream",
        "ice hockey",
        "lacrosse",
        "leafy green",
        "mate",
        "meat on bone",
        "money with wings",
        "mount fuji",
        "oden",
        "ping pong",
        "popcorn",
        "pouring liquid",
        "sake",
        "salt",
        "shaved ice",
        "soap",
        "soft ice cream",
        "spaghetti",
        "sushi",
        "tennis",
        "thread",
        "tokyo tower",
        "wood",
        "yarn",
    ]
)
"""Substances, activities and proper names."""

DEFINITE = frozenset({"kaaba", "milky way", "statue of liberty"})
"""There is one of each."""

_AN_ANYWAY = ("hourglass", "x-ray")
_A_ANYWAY = ("uni", "euro", "ewe", "one-")
_IRREGULAR = {
    "mouse": "mice",
    "goose": "geese",
    "fish": "fish",
    "sheep": "sheep",
    "deer": "deer",
    "knife": "knives",
    "leaf": "leaves",
    "wolf": "wolves",
    "ox": "oxen",
    "bison": "bison",
    "shrimp": "shrimp",
    "moose": "moose",
    "squid": "squid",
    "t-rex": "t-rexes",
}
# "bowl with spoon" has its plural on the noun before these words, not on the last word.
_HEAD_BEFORE = re.compile(
    r" (?:with|without|of|on|in|behind|over|at|tilted|showing|facing|fluttering|done|not) "
    r"| (?:done|not done)$"
)
_LOOSE = [
    "moon",
    "globe",
    "mailbox",
    "clock",
    "notebook",
    "train",
    "railway",
    "envelope",
    "calendar",
    "mountain",
    "speaker",
]


def is_plural(name: str) -> bool:
    """Whether the name takes "are"."""
    return name in PLURAL_ONLY


def countable(name: str) -> bool:
    """Whether "two ..." can be said of it."""
    return name not in PLURAL_ONLY and name not in WITHOUT_ARTICLE and name not in DEFINITE


def with_article(name: str) -> str:
    """``a kite``, ``an owl``, ``goggles``, ``the milky way``."""
    if name in PLURAL_ONLY or name in WITHOUT_ARTICLE:
        return name
    if name in DEFINITE:
        return f"the {name}"
    vowel = name[0] in "aeiou" and not name.startswith(_A_ANYWAY)
    return f"an {name}" if vowel or name.startswith(_AN_ANYWAY) else f"a {name}"


def plural(name: str) -> str:
    """The plural of a countable name; other names come back as they are."""
    if not countable(name):
        return name
    if found := _HEAD_BEFORE.search(name):
        return plural(name[: found.start()]) + name[found.start() :]
    front, _, last = name.rpartition(" ")
    return f"{front} {_plural_word(last)}" if front else _plural_word(last)


def _plural_word(word: str) -> str:
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if word.endswith("s") and not word.endswith(("ss", "us", "ass")):
        return word
    if word.endswith(("s", "x", "ch", "sh")):
        return word + "es"
    if word.endswith("y") and word[-2:-1] not in ("", *"aeiou"):
        return word[:-1] + "ies"
    return word + "s"


def counted(name: str, count: int) -> str:
    """``a fox`` for one, ``three foxes`` for more."""
    return with_article(name) if count == 1 else f"{NUMBERS[count]} {plural(name)}"


def sentence(text: str) -> str:
    """Capital first letter and a full stop."""
    return text[0].upper() + text[1:] + "."


def listed(phrases: list[str]) -> str:
    """``a, b and c``."""
    if len(phrases) == 1:
        return phrases[0]
    return ", ".join(phrases[:-1]) + " and " + phrases[-1]


def loose(name: str) -> str:
    """The name without what a 48-pixel drawing cannot show: kinds of moon, mailbox, book, face."""
    for key in _LOOSE:
        if key in name:
            return key
    name = re.sub(
        r"^(oncoming|front-facing|closed|open|delivery|guide|service|racing|cooked|fried) ",
        "",
        name,
    )
    name = re.sub(
        r"^(red|green|blue|orange|yellow|purple|brown|black|white) (?=book|apple|square|circle)",
        "",
        name,
    )
    return name.removesuffix(" face")
