import random

import pytest

from k3vl.config import load_media_config
from k3vl.demo.batches import BatchMaker
from k3vl.demo.buckets import BUCKETS
from k3vl.demo.chat import Chat, Media, Style
from k3vl.demo.clips import SAMPLE_FPS, clip_times, timestamp
from k3vl.demo.forms import JSON_OBJECT_NOTICE
from k3vl.demo.pack import CHECKPOINT
from k3vl.demo.scene import SceneMaker, SceneOptions
from k3vl.demo.tool_tasks import FORBIDDEN, REQUIRED, declare, random_tool, tool_turn
from k3vl.demo.turns import Call, Turn
from k3vl.demo.words import find_fonts
from k3vl.types import (
    ChatOptions,
    MediaGroup,
    MediaLayout,
    MediaPart,
    Message,
    TextPart,
    ToolCall,
)
from k3vl.vision.plan import format_timestamp, sample_frames
from k3vl.xtml.render import render
from k3vl.xtml.tokenizer import encode, load_tokenizer


@pytest.fixture(scope="module")
def chat():
    return Chat(CHECKPOINT / "tokenizer.json")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(CHECKPOINT)


TURNS = (
    Turn("caption", "Describe this.", "A fox and an owl.", "Left to right: fox, owl."),
    Turn("text", "Read the text.", "A7Q <|sep|>", ""),
)


def _messages(parts, style):
    first = [MediaPart("image" if p.timestamp == "" else "video", b"") for p in parts[:1]]
    if all(p.timestamp == "" for p in parts):
        first = [MediaPart("image", b"") for _ in parts]
    out = []
    if style.system:
        out.append(Message(role="system", parts=(TextPart(style.system),)))
    for i, turn in enumerate(TURNS):
        media, text = (first if i == 0 else []), [TextPart(turn.question)]
        order = (*text, *media) if style.media_last else (*media, *text)
        out.append(Message(role="user", parts=tuple(order)))
        out.append(
            Message(role="assistant", parts=(TextPart(turn.answer),), reasoning=turn.thought)
        )
    return out


@pytest.mark.parametrize(
    "style",
    [
        Style(),
        Style(media_last=True, system="Answer briefly."),
        Style(thinking=True),
        Style(thinking=True, effort="high"),
    ],
)
@pytest.mark.parametrize(
    "media",
    [
        (Media("image 640x48", 3),),
        (Media("image 28x28", 1), Media("image 1000x2000", 4)),
        (Media("video", 2, "00:00:00.000"), Media("video", 2, "00:00:02.250")),
    ],
)
def test_rows_are_what_the_renderer_writes(chat, tokenizer, media, style):
    layouts = _layouts(media)
    options = ChatOptions(
        thinking=style.thinking, thinking_effort=style.effort, add_generation_prompt=False
    )
    segments = render(_messages(media, style), options=options, media=layouts)
    row = chat.row((media,), TURNS, style, limit=10_000)
    assert row.ids == list(encode(segments, tokenizer))
    pads = [i for i, token in enumerate(row.ids) if token == 9]
    assert pads == [at + k for at, m in zip(row.media, media, strict=True) for k in range(m.tokens)]


SHOWN = {
    "picture": (Media("image 640x48", 3),),
    "two": (Media("image 28x28", 1), Media("image 1000x2000", 4)),
    "clip": (Media("video", 2, "00:00:00.000"), Media("video", 2, "00:00:02.250")),
    "nothing": (),
}


def _layouts(shown):
    """What the processor tells the renderer about a message's media."""
    if shown and shown[0].timestamp:
        return [
            MediaLayout("video", 56, 28, tuple(MediaGroup(m.tokens, m.timestamp) for m in shown))
        ]
    sizes = [[int(n) for n in m.header.split()[1].split("x")] for m in shown]
    return [
        MediaLayout("image", w, h, (MediaGroup(m.tokens),))
        for m, (w, h) in zip(shown, sizes, strict=True)
    ]


@pytest.mark.parametrize(
    "style", [Style(), Style(media_last=True, system="Answer briefly."), Style(thinking=True)]
)
@pytest.mark.parametrize(
    "kinds", [("picture", "picture"), ("clip", "nothing", "two"), ("two", "clip", "nothing")]
)
def test_chats_with_media_in_every_message_are_what_the_renderer_writes(
    chat, tokenizer, kinds, style
):
    shown = [SHOWN[kind] for kind in kinds]
    turns = [Turn("name", f"What is this, {n}?", f"A fox {n}.", "Fox.") for n in range(len(kinds))]
    messages, layouts = [], []
    if style.system:
        messages.append(Message(role="system", parts=(TextPart(style.system),)))
    for media, turn in zip(shown, turns, strict=True):
        own = _layouts(media)
        layouts += own
        parts = [MediaPart(layout.kind, b"") for layout in own]
        text = [TextPart(turn.question)]
        order = (*text, *parts) if style.media_last else (*parts, *text)
        messages.append(Message(role="user", parts=order))
        answer = (TextPart(turn.answer),)
        messages.append(Message(role="assistant", parts=answer, reasoning=turn.thought))
    options = ChatOptions(thinking=style.thinking, add_generation_prompt=False)
    segments = render(messages, options=options, media=layouts)
    row = chat.row(shown, turns, style, limit=10_000)
    assert row.ids == list(encode(segments, tokenizer))
    pads = [i for i, token in enumerate(row.ids) if token == 9]
    items = [m for media in shown for m in media]
    assert pads == [at + k for at, m in zip(row.media, items, strict=True) for k in range(m.tokens)]
    said = [chat.decode(row.ids[start:end]) for start, end in row.answers]
    assert said == [turn.answer for turn in turns]
    assert set(row.owners) == set(range(len(turns))), "every answer is learned"


def test_a_message_that_does_not_fit_takes_its_picture_with_it(chat):
    shown = [SHOWN["picture"], SHOWN["two"]]
    whole = chat.row(shown, TURNS, Style(), limit=1000)
    short = chat.row(shown, TURNS, Style(), limit=len(whole.ids) - 1)
    assert short.turns == [TURNS[0]]
    assert short.media == whole.media[:1]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("kind", ["count", "caption", "tags", "log"])
def test_tool_rows_are_what_the_renderer_writes(chat, tokenizer, kind, thinking):
    rng = random.Random(kind)
    tools = [random_tool(rng, kind), random_tool(rng, "tags")]
    arguments = {"name": "fox", "number": 3, "names": ["fox", "owl"]}
    turn = Turn("tool", "Do it.", "Done.", "I call.", (Call(tools[0].name, arguments),), ("ok",))
    style = Style(thinking=thinking, effort="low", tools=declare(tools))
    row = chat.row((), (turn, TURNS[0]), style, limit=10_000)
    messages = [
        Message(role="user", parts=(TextPart(turn.question),)),
        Message(
            role="assistant",
            parts=(),
            reasoning=turn.thought,
            tool_calls=(ToolCall(name=tools[0].name, arguments=arguments, id="1"),),
        ),
        Message(role="tool", parts=(TextPart("ok"),), tool_call_id="1"),
        Message(role="assistant", parts=(TextPart("Done."),)),
        Message(role="user", parts=(TextPart(TURNS[0].question),)),
        Message(role="assistant", parts=(TextPart(TURNS[0].answer),), reasoning=TURNS[0].thought),
    ]
    options = ChatOptions(thinking=thinking, thinking_effort="low", add_generation_prompt=False)
    declarations = [tool.declaration() for tool in tools]
    segments = render(messages, tools=declarations, options=options)
    assert row.ids == list(encode(segments, tokenizer))


@pytest.mark.parametrize(
    ("notice", "options"),
    [
        (REQUIRED, ChatOptions(thinking=False, tool_choice="required")),
        (FORBIDDEN, ChatOptions(thinking=False, tool_choice="none")),
        (JSON_OBJECT_NOTICE, ChatOptions(thinking=False, response_format="json_object")),
    ],
)
def test_a_notice_stands_where_the_template_puts_it(chat, tokenizer, notice, options):
    turn = Turn("json", "As JSON.", "[]", notice=notice)
    row = chat.row((), (turn, TURNS[0]), Style(), limit=10_000)
    assert row.turns == [turn], "nothing follows a turn with a notice"
    message = Message(role="user", parts=(TextPart(turn.question),))
    prompt = list(encode(render([message], options=options), tokenizer))
    assert row.ids[: len(prompt)] == prompt
    assert row.answers[0][0] == len(prompt)


def test_declared_arguments_are_the_ones_called(atlas):
    maker = SceneMaker(atlas, 3)
    rng = random.Random(1)
    called = 0
    for _ in range(100):
        tool = random_tool(rng, rng.choice(("count", "caption", "tags", "log")))
        turn = tool_turn(rng, maker.scene(SceneOptions()), tool, lambda items: "A fox.")
        if turn is None:
            continue
        called += 1
        declared = tool.declaration()["function"]
        (call,) = turn.calls
        assert call.tool == declared["name"]
        assert list(call.arguments) == declared["parameters"]["required"]
    assert called > 50


def test_targets_are_the_assistants_tokens(chat):
    row = chat.row(((Media("image 28x28", 1),),), TURNS, Style(thinking=True), limit=1000)
    said = [chat.decode(row.ids[start:end]) for start, end in row.answers]
    assert said == [turn.answer for turn in TURNS]
    text = chat.decode([row.ids[at] for at in row.targets])
    assert text.startswith("Left to right: fox, owl.think")
    assert "Describe" not in text


def test_turns_beyond_the_limit_are_left_out(chat):
    whole = chat.row((), TURNS, Style(), limit=1000)
    short = chat.row((), TURNS, Style(), limit=len(whole.ids) - 1)
    assert [turn.task for turn in short.turns] == ["caption"]
    assert short.ids == whole.ids[: len(short.ids)]


@pytest.mark.parametrize("rate", [1.0, 2.0, 5.0, 12.0, 25.0, 30000 / 1001])
@pytest.mark.parametrize("frames", [1, 3, 4, 9, 16])
def test_clip_times_are_those_of_the_processors_plan(rate, frames):
    config = load_media_config(CHECKPOINT)
    assert config.sample_fps == SAMPLE_FPS
    times = clip_times(rate, frames)
    length = round(frames * rate / min(rate, SAMPLE_FPS))
    chosen = sample_frames(length, rate, config.sample_fps)
    assert times == [index / rate for index in chosen]
    assert [timestamp(t) for t in times] == [format_timestamp(t) for t in times]


@pytest.mark.parametrize("bucket", BUCKETS, ids=lambda b: b.name)
def test_batches_keep_their_shapes(atlas, chat, bucket):
    seed = random.Random(bucket.name).randrange(1000)
    batch = BatchMaker(atlas, chat, seed, find_fonts(atlas.folder)).batch(bucket, 3)
    assert batch.ids.shape == (3, bucket.row)
    assert batch.slots.shape == (3, len(bucket.runs), bucket.visual)
    assert batch.geometry.shape[0] == 3 * sum(bucket.frames)
    assert batch.extent.shape[0] == 3 * len(bucket.media)
    flat = batch.ids.reshape(-1)
    assert (flat[batch.predict + 1] == batch.target).all()
    heights, widths = batch.extent.T
    assert ((heights > bucket.height - 28) & (heights <= bucket.height)).all()
    assert ((widths > bucket.width - 28) & (widths <= bucket.width)).all()
