import pytest

from k3vl.app.evaluation.confidence import Judged, keep, separation, threshold_keeping


def judged(*pairs):
    return [Judged(confidence, right) for confidence, right in pairs]


ANSWERS = judged((0.9, True), (0.8, True), (0.7, False), (0.6, True), (0.2, False), (0.1, False))


def test_what_a_threshold_keeps():
    kept = keep(ANSWERS, 0.65)
    assert (kept.answered, kept.right) == (0.5, pytest.approx(2 / 3))
    assert (kept.right_kept, kept.wrong_withheld) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    nothing = keep(ANSWERS, 1.0)
    assert (nothing.answered, nothing.right, nothing.right_kept) == (0.0, 0.0, 0.0)


def test_threshold_keeps_the_share_of_right_answers():
    right = judged(*((i / 1000, True) for i in range(1000)))
    for share in (0.5, 0.9, 0.98):
        threshold = threshold_keeping(right, share)
        assert keep(right, threshold).right_kept >= share
        assert keep(right, threshold + 0.02).right_kept < share


def test_separation_is_one_for_perfect_order_and_half_for_none():
    assert separation(judged((0.9, True), (0.8, True), (0.1, False))) == 1.0
    assert separation(judged((0.1, True), (0.9, False))) == 0.0
    assert separation(judged((0.5, True), (0.5, False), (0.5, True))) == 0.5
    assert separation(ANSWERS) == pytest.approx(8 / 9)
    assert separation(judged((0.5, True))) is None


def test_no_rounding_takes_more_than_the_share():
    right = judged(*((confidence, True) for confidence in (0.301, 0.9003, 0.9, 0.95, 0.99)))
    for share in (0.5, 0.7, 0.8, 0.97):
        assert keep(right, threshold_keeping(right, share)).right_kept >= share
