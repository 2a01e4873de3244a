from collections import Counter

import pytest

from k3vl.demo import metrics


def test_wilson_interval_of_known_values():
    low, high = metrics.Share(95, 100).interval
    assert (round(low, 3), round(high, 3)) == (0.888, 0.978)
    assert metrics.Share(0, 10).interval[0] == 0.0
    assert metrics.Share(10, 10).interval[1] == 1.0


@pytest.mark.parametrize(
    ("answer", "reference", "same"),
    [
        ("A goggles.", "Goggles.", True),
        ("The goggles is above the owl.", "The goggles are above the owl.", True),
        ("A kite moves up.", "A kite moves down.", False),
    ],
)
def test_articles_and_verbs_do_not_count(answer, reference, same):
    same_words = metrics.without_articles(answer) == metrics.without_articles(reference)
    assert same_words == same


def test_captions_are_read_longest_name_first():
    reader = metrics.CaptionReader(["bus", "bus stop", "fox", "goggles", "bowl with spoon"])
    told = reader.read("Two foxes, a bus stop, goggles, three bowls with spoon and a bus.")
    expected = {"fox": 2, "bus stop": 1, "goggles": 1, "bowl with spoon": 3, "bus": 1}
    assert told == Counter(expected)


def test_f1_counts_things_not_captions():
    pairs = [(Counter(a=2, b=1), Counter(a=1, c=1))]
    assert metrics.f1(pairs) == pytest.approx(2 * 1 / 5)


def test_character_errors():
    assert metrics.edit_distance("KITE", "KTES") == 2
    assert metrics.character_errors([("KTE", "KITE"), ("A1", "A1")]) == pytest.approx(1 / 6)
