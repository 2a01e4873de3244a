from k3vl.demo.places import place
from k3vl.demo.scene import Event, Ground, Item, Scene, SceneMaker, SceneOptions
from k3vl.demo.tasks import IMAGE_SHARES, Questioner, caption

_GROUND = Ground(kind=0, first=(1.0, 1.0, 1.0), second=(0.0, 0.0, 0.0), angle=0.0)


def _item(name, x, y=0.5, label=0, **more):
    return Item(name=name, label=label, sprite=0, x=x, y=y, size=0.3, **more)


def test_caption_reads_left_to_right_and_joins_equal_things():
    items = [_item("bus", 0.9), _item("fox", 0.1), _item("owl", 0.4), _item("fox", 0.6)]
    assert caption(items, 10) == "Two foxes, an owl and a bus."


def test_caption_of_shapes_names_their_colour():
    assert caption([_item("circle", 0.5, label=10, colour="red")], 10) == "A red circle."


def test_nine_places():
    assert place(0.1, 0.1) == "top left"
    assert place(0.5, 0.5) == "center"
    assert place(0.5, 0.9) == "bottom"
    assert place(0.9, 0.5) == "right"


def test_relation_is_true_and_never_diagonal(atlas):
    questions = Questioner(SceneMaker(atlas, 3))
    scene = Scene(ground=_GROUND, items=[_item("kite", 0.2), _item("fox", 0.8)])
    answers = {questions.ask("relation", scene).answer for _ in range(20)}
    assert answers == {"The kite is left of the fox.", "The fox is right of the kite."}
    scene = Scene(ground=_GROUND, items=[_item("kite", 0.2, 0.2), _item("fox", 0.8, 0.8)])
    assert questions.ask("relation", scene) is None


def test_plural_names_take_plural_verbs(atlas):
    questions = Questioner(SceneMaker(atlas, 3))
    scene = Scene(ground=_GROUND, items=[_item("goggles", 0.5)], frames=4, event=Event(kind="up"))
    assert questions.ask("video", scene).answer == "Goggles move up."


def test_answers_agree_with_the_scene(atlas):
    maker = SceneMaker(atlas, 11)
    questions = Questioner(maker)
    seen = set()
    for _ in range(400):
        scene = maker.scene(SceneOptions())
        names = [item.name for item in scene.items]
        for turn in questions.turns(scene):
            seen.add(turn.task)
            if turn.task == "yesno":
                asked = [n for n in atlas.names if f" {n} " in turn.question.replace("?", " ")]
                if len(asked) == 1:
                    assert (turn.answer == "Yes.") == (asked[0] in names), turn
            if turn.task == "text":
                assert turn.answer == (scene.strip.text if scene.strip else "There is no text.")
    assert seen == set(IMAGE_SHARES)


def test_moving_things_stay_inside_the_picture(atlas):
    maker = SceneMaker(atlas, 2)
    for _ in range(200):
        scene = maker.scene(SceneOptions(frames=5))
        for frame in range(5):
            x, y, there = scene.at(0, frame)
            half = scene.items[0].size / 2
            assert not there or (half <= x + 1e-9 and x <= 1 - half + 1e-9) or x == scene.items[0].x
            assert 0 < y < 1
        if scene.event.kind == "appear":
            shown = [scene.at(0, frame)[2] for frame in range(5)]
            assert shown == sorted(shown)
            assert len(set(shown)) == 2
