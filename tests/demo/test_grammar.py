import pytest

from k3vl.demo import grammar


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kite", "a kite"),
        ("owl", "an owl"),
        ("unicorn", "a unicorn"),
        ("hourglass done", "an hourglass done"),
        ("x-ray", "an x-ray"),
        ("one-piece swimsuit", "a one-piece swimsuit"),
        ("goggles", "goggles"),
        ("mount fuji", "mount fuji"),
        ("milky way", "the milky way"),
    ],
)
def test_article(name, expected):
    assert grammar.with_article(name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fox", "foxes"),
        ("knife", "knives"),
        ("cherry blossom", "cherry blossoms"),
        ("bowl with spoon", "bowls with spoon"),
        ("four leaf clover", "four leaf clovers"),
        ("bus", "buses"),
        ("berry", "berries"),
        ("monkey", "monkeys"),
        ("computer mouse", "computer mice"),
        ("goggles", "goggles"),
        ("popcorn", "popcorn"),
    ],
)
def test_plural(name, expected):
    assert grammar.plural(name) == expected


def test_list_of_phrases_has_one_and():
    assert grammar.listed(["a"]) == "a"
    assert grammar.listed(["a", "b", "c"]) == "a, b and c"
