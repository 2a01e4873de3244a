import random
import re

import pytest

from k3vl.demo.batches import BatchMaker
from k3vl.demo.buckets import BUCKETS
from k3vl.demo.chat import Chat
from k3vl.demo.pack import CHECKPOINT
from k3vl.demo.scene import Ground, Item, Scene, SceneMaker, SceneOptions
from k3vl.demo.talks import Talker, about, calls_it
from k3vl.demo.tasks import IMAGE_SHARES, Questioner
from k3vl.demo.turns import Turn
from k3vl.demo.words import find_fonts

CHATS = [bucket for bucket in BUCKETS if bucket.chat]
ORDER = ("first", "second", "third", "fourth")


def _scene(name, frames=1):
    ground = Ground(kind=0, first=(1.0, 1.0, 1.0), second=(0.0, 0.0, 0.0), angle=0.0)
    item = Item(name=name, label=0, sprite=0, x=0.5, y=0.5, size=0.3)
    return Scene(ground=ground, items=[item], frames=frames)


PICTURE, CLIP = _scene("fox"), _scene("owl", frames=4)


@pytest.mark.parametrize(
    ("scenes", "which", "names"),
    [
        ([PICTURE, PICTURE, PICTURE], 0, ["first picture"]),
        ([PICTURE, PICTURE, PICTURE], 1, ["second picture", "previous picture"]),
        ([PICTURE, PICTURE, PICTURE], 2, ["third picture", "last picture"]),
        ([PICTURE, CLIP], 0, ["picture"]),
        ([PICTURE, CLIP], 1, ["video"]),
        ([CLIP, PICTURE, CLIP], 0, ["first video"]),
    ],
)
def test_what_a_scene_is_called(scenes, which, names):
    assert calls_it(scenes, which) == names


NAMED = {
    "Describe the picture.": "Describe the first picture.",
    "What is in this image?": "What is in the first picture?",
    "What is at the left of the picture?": "What is at the left of the first picture?",
    "In which part of the picture is it?": "In which part of the first picture is it?",
    "Does the image show a fox?": "Does the first picture show a fox?",
    "How many foxes are there?": "In the first picture, how many foxes are there?",
    "Where is the video game?": "In the first picture, where is the video game?",
    "Is the chart increasing red?": "In the first picture, is the chart increasing red?",
    "What is this?": None,
    "What is written here?": None,
}


@pytest.mark.parametrize(("question", "named"), NAMED.items())
def test_a_question_names_its_picture(question, named):
    turn = about(Turn("x", question, "A."), "first picture")
    assert (turn and turn.question) == named


def _meant(question, seen):
    """The scene that a question is about, as its words say."""
    if found := re.search(
        r"\b(first|second|third|fourth|last|previous) (picture|video)\b", question
    ):
        kind = [s for s in seen if (s.frames > 1) == (found[2] == "video")]
        if found[1] == "last":
            return seen[-1]
        return seen[-2] if found[1] == "previous" else kind[ORDER.index(found[1])]
    if found := re.search(r"\bthe (picture|video)\b", question):
        (only,) = [s for s in seen if (s.frames > 1) == (found[1] == "video")]
        return only
    return seen[-1]


@pytest.mark.parametrize("kinds", ["pp", "ppp", "pppp", "vv", "pv", "vp", "pvp"])
def test_answers_are_about_the_scene_that_is_meant(kinds):
    names = ("fox", "owl", "kite", "bus")
    scenes = [_scene(n, 4 if k == "v" else 1) for n, k in zip(names, kinds, strict=False)]
    questions = ("What do you see?", "How many things are there?", "What is this?")
    rng = random.Random(kinds)

    def ask(scene):
        return Turn("own", rng.choice(questions), scene.items[0].name)

    talker = Talker(rng, ask, lambda items: items[0].name)
    seen_back = 0
    for _ in range(200):
        talk = talker.talk(scenes)
        assert sum(talk.brings) == len(scenes)
        assert talk.brings[0] > 0
        assert sum(n > 0 for n in talk.brings) >= 2, "not all at once"
        shown = 0
        for turn, number in zip(talk.turns, talk.brings, strict=True):
            shown += number
            if turn.task == "own":
                meant = _meant(turn.question, scenes[:shown])
                assert turn.answer == meant.items[0].name, turn
                seen_back += meant is not scenes[shown - 1]
    assert seen_back > 20


def test_what_ends_a_conversation_stands_at_its_end():
    def ask(scene):
        return Turn("json", "As JSON.", "[]", notice=("response-format", "x"))

    talk = Talker(random.Random(0), ask, lambda items: "A fox.").talk([PICTURE, PICTURE])
    assert talk.turns == []


@pytest.mark.parametrize("bucket", CHATS, ids=lambda b: b.name)
def test_chats_bring_everything_and_ask_on(atlas, bucket):
    chat = Chat(CHECKPOINT / "tokenizer.json")
    fonts = find_fonts(atlas.folder)
    batch = BatchMaker(atlas, chat, 3, fonts).batch(bucket, 24)
    turns = [len(row.turns) for row in batch.rows]
    assert min(turns) >= 2
    assert len(set(turns)) > 1
    for row in batch.rows:
        assert len(row.media) == len(bucket.runs)
        # Something was said between the first picture and the last one.
        assert row.answers[0][0] < row.media[-1]
    asked = {turn.task for row in batch.rows for turn in row.turns}
    assert len(asked) > (0 if bucket.charts else 3)
    if bucket.tools:
        assert any(turn.calls for row in batch.rows for turn in row.turns)


def test_every_kind_of_question_comes_up_about_later_pictures(atlas):
    maker = SceneMaker(atlas, 5)
    questions = Questioner(maker)
    talker = Talker(
        maker.rng, lambda s: next(iter(questions.turns(s, 1)), None), lambda items: "A fox."
    )
    later = set()
    for _ in range(1500):
        talk = talker.talk([maker.scene(SceneOptions()) for _ in range(2)])
        later |= {turn.task for turn in talk.turns[1:]}
    assert later >= set(IMAGE_SHARES)
