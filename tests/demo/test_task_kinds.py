import json
import random
from collections import Counter

import numpy as np
import pytest

from k3vl.demo import clips
from k3vl.demo.charts import chart_turn, draw_chart, random_chart
from k3vl.demo.edits import EDITS, difference_turns, edited, several_turns
from k3vl.demo.forms import absent_turn, five_turn, json_turn, number_turn, word_turn
from k3vl.demo.places import is_clear, place
from k3vl.demo.scene import GROUP, Event, Ground, Item, Scene, SceneMaker, SceneOptions
from k3vl.demo.tasks import Questioner
from k3vl.demo.words import draw_number, find_fonts

_GROUND = Ground(kind=0, first=(1.0, 1.0, 1.0), second=(0.0, 0.0, 0.0), angle=0.0)


def _item(name, x, y=0.5, **more):
    return Item(name=name, label=0, sprite=0, x=x, y=y, size=0.3, **more)


# ---------------------------------------------------------------------- charts


def test_answers_about_charts_are_true():
    rng = random.Random(2)
    seen = set()
    for _ in range(400):
        chart = random_chart(rng)
        values = dict(zip(chart.labels, chart.values, strict=True))
        turn = chart_turn(rng, chart)
        words = turn.question.removesuffix("?").removesuffix(".").replace(",", "").split()
        answer = turn.answer.removesuffix(".")
        if words[-1] in values and "value" in turn.question and "Which bar" not in turn.question:
            seen.add("value")
            assert answer == str(values[words[-1]])
        elif {"tallest", "largest", "highest"} & set(words) and " or " not in turn.question:
            seen.add("largest")
            assert values[answer] == max(values.values())
        elif {"smallest", "lowest"} & set(words):
            seen.add("smallest")
            assert values[answer] == min(values.values())
        elif "JSON" in turn.question:
            seen.add("json")
            assert json.loads(turn.answer) == values
    assert seen == {"value", "largest", "smallest", "json"}


def test_taller_bars_have_more_ink(atlas_folder):
    rng = random.Random(1)
    fonts = find_fonts(atlas_folder)
    for _ in range(20):
        chart = random_chart(rng)
        if len(set(chart.colours)) < len(chart.colours):
            continue
        pixels = np.asarray(draw_chart(chart, 224, 200, fonts)).reshape(-1, 3)
        areas = [int((pixels == colour).all(1).sum()) for colour in chart.colours]
        assert np.argmax(areas) == np.argmax(chart.values)
        assert np.argmin(areas) == np.argmin(chart.values)


# ---------------------------------------------------------------------- two pictures


@pytest.mark.parametrize("kind", EDITS)
def test_an_edit_changes_one_thing(atlas, kind):
    maker = SceneMaker(atlas, 5)
    made = 0
    for _ in range(400):
        scene = maker.scene(SceneOptions(shapes=True))
        before = [(i.name, i.sprite, i.x, i.y, i.colour) for i in scene.items]
        if (found := edited(maker, scene, kind)) is None:
            continue
        made += 1
        after, edit = found
        assert [(i.name, i.sprite, i.x, i.y, i.colour) for i in scene.items] == before
        now = [(i.name, i.sprite, i.x, i.y, i.colour) for i in after.items]
        gone, new = Counter(before) - Counter(now), Counter(now) - Counter(before)
        expected = {"added": (0, 1), "removed": (1, 0), "same": (0, 0)}.get(kind, (1, 1))
        assert (gone.total(), new.total()) == expected, edit
        if kind == "moved":
            (was,), (is_now,) = gone, new
            assert f"from the {place(was[2], was[3])} to the {place(is_now[2], is_now[3])}" in (
                edit.answer
            )
        if kind == "recoloured":
            (was,), (is_now,) = gone, new
            assert edit.answer == f"The {was[0]} changed from {was[4]} to {is_now[4]}."
            assert was[4] != is_now[4]
    assert made > 10


def test_which_picture_is_the_one_that_shows_it(atlas):
    maker = SceneMaker(atlas, 6)
    asked = 0
    for _ in range(100):
        scenes = [maker.scene(SceneOptions()) for _ in range(3)]
        for turn in several_turns(maker.rng, scenes, lambda items: "A fox."):
            order = ["The first.", "The second.", "The third."]
            counts = [len(scene.items) for scene in scenes]
            if "most objects" in turn.question:
                asked += 1
                assert counts[order.index(turn.answer)] == max(counts)
            elif turn.task == "which":
                chosen = scenes[order.index(turn.answer)]
                assert any(turn.question.endswith(f" {i.name}?") for i in chosen.items)
    assert asked > 20


def test_nothing_changed_is_a_no():
    scene = Scene(ground=_GROUND, items=[_item("fox", 0.2)])
    edit = edited(_Never(), scene, "same")[1]
    answers = {
        turn.task: turn.answer
        for seed in range(20)
        for turn in difference_turns(random.Random(seed), (scene, scene), edit)
    }
    assert answers == {"difference": "Nothing changed.", "differs": "No."}


class _Never:
    rng = random.Random(0)


# ---------------------------------------------------------------------- clips


def test_two_events_lie_in_different_groups_and_in_order(atlas):
    maker = SceneMaker(atlas, 4)
    made = 0
    for frames in (8, 6, 9, 16):
        for _ in range(50):
            scene = maker.scene(SceneOptions(items=2, frames=frames, events=2))
            if scene.later is None:
                continue
            made += 1
            first, second = scene.event.frame, scene.later.frame
            assert 1 <= first < second < frames
            assert first // GROUP < second // GROUP
            for item, event in enumerate((scene.event, scene.later)):
                shown = [scene.at(item, frame)[2] for frame in range(frames)]
                change = next(f for f in range(1, frames) if shown[f] != shown[f - 1])
                assert change == event.frame
    assert made > 100


def test_times_are_those_of_the_group_in_the_prompt(atlas):
    scene = Scene(
        ground=_GROUND,
        items=[_item("fox", 0.2), _item("goggles", 0.8)],
        frames=8,
        event=Event(kind="appear", frame=2),
        later=Event(kind="disappear", frame=5),
        times=clips.group_times(2.0, 8),
    )
    questions = Questioner(SceneMaker(atlas, 1))
    assert scene.times == ("00:00:00.000", "00:00:02.000")
    assert {questions.ask("when", scene).answer for _ in range(20)} == {
        "At 00:00:00.000.",
        "At 00:00:02.000.",
    }
    assert questions.ask("video", scene).answer == "First a fox appears, then goggles disappear."
    assert {questions.ask("order", scene).answer for _ in range(20)} == {
        "A fox appears.",
        "Goggles disappear.",
    }
    for _ in range(40):
        turn = questions.ask("does", scene)
        if "move" in turn.question:
            assert turn.answer == "No."


# ---------------------------------------------------------------------- form


def test_forms_are_kept():
    rng = random.Random(3)
    one = Scene(ground=_GROUND, items=[_item("fox", 0.5)])
    two = Scene(ground=_GROUND, items=[_item("owl", 0.7), _item("fox", 0.2), _item("owl", 0.9)])
    assert word_turn(rng, one).answer == "Fox."
    assert word_turn(rng, Scene(ground=_GROUND, items=[_item("green apple", 0.5)])) is None
    assert five_turn(rng, two) is None, "two owls need a plural"
    assert five_turn(rng, Scene(ground=_GROUND, items=two.items[:2])).answer == "Fox and owl."
    answers = {json_turn(rng, two).answer for _ in range(20)}
    assert answers == {'["fox", "owl", "owl"]', '{"fox": 1, "owl": 2}'}
    party = Scene(ground=_GROUND, items=[_item("piñata", 0.5)])
    assert {json_turn(rng, party).answer for _ in range(20)} == {'["piñata"]', '{"piñata": 1}'}
    assert number_turn(rng, two.items, "owl").answer == "2"
    assert absent_turn(rng, "goggles").answer == "I do not see goggles."


def test_empty_pictures_are_said_to_be_empty(atlas):
    questions = Questioner(SceneMaker(atlas, 1))
    scene = questions_scene = SceneMaker(atlas, 2).scene(SceneOptions(items=0, text=False))
    assert questions_scene.items == []
    assert questions.ask("caption", scene).answer == "I do not see any object."
    assert questions.ask("yesno", scene).answer == "No."
    assert questions.ask("total", scene).answer == "Zero."
    assert questions.ask("colour", scene) is None


def test_numbers_have_no_leading_zero():
    rng = random.Random(0)
    drawn = [draw_number(rng) for _ in range(500)]
    assert {len(text) for text in drawn} == {1, 2, 3, 4, 5, 6}
    assert all(text == str(int(text)) for text in drawn)


def test_places_near_a_border_are_not_asked_about():
    assert not is_clear(0.39, 0.1)
    assert is_clear(0.5, 0.1)
