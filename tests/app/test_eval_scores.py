import pytest

from k3vl.app.evaluation.scores import (
    Said,
    Score,
    edit_distance,
    score,
    summarise,
    things,
    wilson,
    without_articles,
)


def got(metric, text, *answers, calls=()):
    return score(metric, Said(text, calls), answers)


def test_wilson_interval_of_known_values():
    low, high = wilson(95, 100)
    assert (round(low, 3), round(high, 3)) == (0.888, 0.978)
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == 1.0


@pytest.mark.parametrize(
    ("answer", "reference", "same"),
    [
        ("A goggles.", "Goggles.", True),
        ("The goggles is above the owl.", "The goggles are above the owl.", True),
        ("A kite moves up.", "A kite moves down.", False),
    ],
)
def test_articles_and_verbs_do_not_count_in_loose(answer, reference, same):
    assert (without_articles(answer) == without_articles(reference)) == same
    assert got("loose", answer, reference).got == same


def test_any_right_answer_will_do():
    assert got("exact", "A cat.", "A kitten.", "A cat.") == Score(1)
    assert got("exact", "A dog.", "A kitten.", "A cat.") == Score(0)
    assert got("cer", "CAT", "CATS", "CAT").got == 0, "the nearest one, where less is better"


def test_things_of_a_sentence_and_of_a_list():
    assert things("Two foxes, a kite and a bus.") == {"foxes": 2, "kite": 1, "bus": 1}
    assert things('["fox", "bus", "fox"]') == {"fox": 2, "bus": 1}
    assert things("") == {}


def test_f1_counts_things_not_captions():
    one = got("f1", "A fox, a kite and an owl.", "A fox and a bus.")
    assert (one.got, one.of) == (2, 5)
    none = got("f1", "A fox.", "A bus.")
    # Sum over sum: a long caption weighs more than a short one.
    assert summarise("f1", [one, none], ["", ""]).value == pytest.approx(2 / 7)


def test_character_errors_per_right_character():
    assert edit_distance("KITE", "KTES") == 2
    scores = [got("cer", "KTE", "KITE"), got("cer", "A1", "A1")]
    assert summarise("cer", scores, ["", ""]).value == pytest.approx(1 / 6)


def test_json_is_compared_as_json():
    assert got("json", '{"b": [1, 2], "a": "x"}', {"a": "x", "b": [1, 2]}).got
    assert not got("json", '{"b": [2, 1], "a": "x"}', {"a": "x", "b": [1, 2]}).got
    assert not got("json", "a: x", {"a": "x"}).got


def test_tool_calls_are_compared_with_their_arguments():
    call = {"name": "count_objects", "arguments": {"name": "fox"}}
    assert got("tool_call", "", call, calls=(call,)).got
    assert not got("tool_call", "", {**call, "arguments": {"name": "owl"}}, calls=(call,)).got
    assert not got("tool_call", "", call, calls=(call, call)).got
    assert not got("tool_call", "count_objects", call).got


def test_balanced_averages_over_right_answers():
    """Nine in ten questions are about one thing; who always says so is right half of the time."""
    answers = ["One."] * 9 + ["Two."]
    scores = [got("balanced", "One.", answer) for answer in answers]
    assert summarise("balanced", scores, answers).value == 0.5
    assert summarise("exact", scores, answers).value == 0.9


def test_bootstrap_interval_holds_the_value_and_narrows_with_n():
    def width(n):
        scores = [Score(i % 2, 1) for i in range(n)]
        value = summarise("f1", scores, [""] * n)
        assert value.low <= 0.5 <= value.high
        assert value.method == "bootstrap"
        return value.high - value.low

    assert width(400) < 0.5 * width(25)


def test_a_perfect_row_is_not_certain():
    value = summarise("f1", [Score(2, 2)] * 10, [""] * 10)
    assert (round(value.low, 3), value.high) == (0.722, 1.0)
