"""Held-out questions: the files, their labels, and what they hold out."""

import json

import pytest
from PIL import Image

from k3vl.app.evaluation.labels import read_labels
from k3vl.app.evaluation.scores import Said, score
from k3vl.config import load_media_config
from k3vl.demo.atlas import HELD, TRAIN
from k3vl.demo.floor import NameFloor
from k3vl.demo.heldout import (
    FLOOR,
    OPEN_SETS,
    QUICK,
    quick_splits,
    splits,
    write_split,
)
from k3vl.demo.heldout_scenes import HeldOut, Split
from k3vl.demo.pack import CHECKPOINT
from k3vl.demo.scene import SceneOptions
from k3vl.demo.words import word_list
from k3vl.types import MediaPart
from k3vl.vision.processor import MediaProcessor


@pytest.fixture(scope="module")
def floor(atlas):
    return NameFloor(atlas)


def written(atlas, folder, task, floor=None, items=4, **fields):
    split = next(s for s in splits(atlas) if s.task == task and s.size is not None)
    write_split(split, atlas, floor, folder, items)
    return read_labels(folder)


def test_every_split_has_a_name_of_its_own_and_a_style(atlas):
    names = [split.name for split in splits(atlas)]
    assert len(set(names)) == len(names)
    assert {split.style for split in splits(atlas)} == {TRAIN, HELD, "openmoji"}


TASKS = (
    "name",
    "caption",
    "yesno",
    "text",
    "digits",
    "chart",
    "pair",
    "difference",
    "video",
    "order",
    "when",
    "word",
    "five",
    "json",
    "number",
    "absent",
    "tool",
)


@pytest.mark.parametrize("task", TASKS)
def test_labels_are_what_eval_reads(atlas, tmp_path, floor, task):
    questions = written(atlas, tmp_path, task, floor)
    assert len(questions) == 4
    for question in questions:
        answer = question.answers[0]
        right = Said(answer) if isinstance(answer, str) else Said(json.dumps(answer))
        if task == "tool":
            right = Said("", tuple(answer))
        assert all(score(m, right, question.answers).got or m == "cer" for m in question.metrics)
        assert len(question.files) == (2 if task in ("pair", "difference") else 1)
        assert (FLOOR in question.baselines) == (task in ("name", "caption"))


def test_the_same_questions_come_every_time(atlas, tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
        written(atlas, folder, "caption")
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name


@pytest.mark.parametrize(
    ("name", "brought"),
    [
        ("new picture in a later turn, name", 1),
        ("new picture in a later turn, caption", 1),
        ("new clip in a later turn", 1),
        ("earlier picture, caption", 0),
        ("earlier picture, what is at a place", 0),
    ],
)
def test_later_questions_come_after_others(atlas, tmp_path, floor, name, brought):
    split = next(s for s in splits(atlas) if s.name == name)
    write_split(split, atlas, floor, tmp_path, 6)
    lengths = set()
    for question in read_labels(tmp_path):
        lengths.add(len(question.history))
        assert len(question.files) == brought
        files = [path for turn in question.history for path in turn.files]
        assert len(files) == len(question.history)
        assert len({*files, *question.files}) == len(files) + brought, "every picture is new"
        if not brought:
            assert len(files) >= 2
            words = question.prompt.split()
            assert {"first", "second", "third", "previous"} & set(words), question.prompt
    assert len(lengths) > 1


def _captions(atlas, x):
    """Right answers about two things, the second of which lies at ``x``."""
    split = next(s for s in splits(atlas) if s.name == "form: at most five words")
    asker = HeldOut(split, atlas, 1)
    scene = asker._maker.scene(SceneOptions(items=2, repeat=False, shapes=False, text=False))
    scene.items[0].name, scene.items[1].name = "fox", "owl"
    scene.items[0].x, scene.items[1].x = 0.5, x
    turn, also = asker._told((scene,), lambda shown: asker._questions.ask("five", shown[0]))
    assert all(other.question == turn.question for other in also)
    return [turn.answer, *(other.answer for other in also)]


def test_what_lies_one_above_the_other_may_be_told_in_either_order(atlas):
    assert _captions(atlas, 0.7) == ["Fox and owl."]
    assert _captions(atlas, 0.51) == ["Fox and owl.", "Owl and fox."]
    assert _captions(atlas, 0.49) == ["Owl and fox.", "Fox and owl."]


def test_other_right_answers_change_no_question(atlas):
    """A row's questions stay what they are, whether or not their answers are ambiguous."""
    for task in ("json", "tool", "pair"):
        split = next(s for s in splits(atlas) if s.task == task)
        asked = [one for one, _ in zip(HeldOut(split, atlas, 4), range(60), strict=False)]
        plain = HeldOut(split, atlas, 4)
        plain._told = lambda scenes, ask: (ask(scenes), ())
        alone = [one for one, _ in zip(plain, range(60), strict=False)]
        assert [one.turn for one in asked] == [one.turn for one in alone]
        assert any(one.also for one in asked)


def test_words_are_unseen_and_codes_are_none(atlas):
    unseen = set(word_list(atlas.names, unseen=True))
    for split in splits(atlas):
        if split.task == "text":
            asked = iter(HeldOut(split, atlas, 1))
            said = [next(asked).turn.answer for _ in range(20)]
            assert all((text in unseen) == (split.printed == "words") for text in said)


def test_slow_things_move_less_than_training_ever_moves_them(atlas):
    slow = next(split for split in splits(atlas) if split.slow)
    asked = iter(HeldOut(slow, atlas, 1))
    for _ in range(50):
        event = next(asked).scenes[0].event
        assert event.kind in ("left", "right", "up", "down")
        assert abs(event.path[1] - event.path[0]) < 0.3


def test_the_floor_knows_what_it_learned_and_answers_for_all(atlas, floor):
    learned = [i for i, s in enumerate(atlas.sprites) if s.style == TRAIN and i not in atlas.held]
    right = [floor.name(atlas.sprites[i]) == atlas.sprites[i].name for i in learned]
    assert sum(right) > 0.9 * len(right)
    assert all(0 <= floor.name(sprite) < len(atlas.names) for sprite in atlas.sprites)


def test_only_keeps_names_and_held_cells(atlas):
    shown = atlas.only(OPEN_SETS)
    assert shown.names == atlas.names
    assert {sprite.drawing_set for sprite in shown.sprites} <= set(OPEN_SETS)
    kept = [atlas.sprites[i] for i in atlas.held if atlas.sprites[i].drawing_set in OPEN_SETS]
    assert {shown.sprites[i] for i in shown.held} == set(kept)
    assert kept


def test_quick_splits_need_no_drawing_that_may_not_be_passed_on(atlas):
    assert {split.style for split in quick_splits(atlas)} == {TRAIN, HELD}
    for split in quick_splits(atlas):
        asked = iter(HeldOut(split, atlas.only(OPEN_SETS), 1))
        for item in (item for scene in next(asked).scenes for item in scene.items):
            assert item.sprite >= 0


def test_the_package_holds_its_questions():
    """Small, complete, and nothing that no question is about."""
    questions = read_labels(QUICK)
    shown = [part for question in questions for part in (question, *question.history)]
    named = {path.name for part in shown for path in part.files}
    assert named | {"labels.jsonl", "NOTICE"} == {path.name for path in QUICK.iterdir()}
    assert sum(path.stat().st_size for path in QUICK.iterdir()) < 3 * 2**20
    assert len({question.split for question in questions}) >= 20


def test_pictures_of_any_size_are_of_many_sizes(atlas, tmp_path):
    split = Split(name="any", task="caption", size=None)
    write_split(split, atlas, None, tmp_path, 5)
    sizes = set()
    for question in read_labels(tmp_path):
        with Image.open(question.files[0]) as image:
            sizes.add(image.size)
    assert len(sizes) == 5


def test_times_are_those_that_the_processor_finds(atlas, tmp_path):
    """The right answer to "when" comes from the file's rate; the processor reads the file."""
    media = load_media_config(CHECKPOINT)
    for question in written(atlas, tmp_path, "when"):
        (path,) = question.files
        found = MediaProcessor(media).process(MediaPart("video", path))
        stamps = [group.timestamp for group in found.layout.groups]
        assert question.answers[0] in [f"At {stamp}." for stamp in stamps]
