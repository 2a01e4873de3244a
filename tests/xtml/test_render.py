"""Layout of the prompt where the golden vectors do not reach: media, partial mode, typed input."""

from __future__ import annotations

import pytest

from k3vl.errors import TemplateError
from k3vl.types import (
    ChatOptions,
    MediaGroup,
    MediaLayout,
    MediaPart,
    Message,
    TextPart,
    ToolCall,
)
from k3vl.xtml import ImagePrompts, Segment, render
from k3vl.xtml.render import media_parts, order_results

PICTURE = MediaLayout("image", 640, 480, (MediaGroup(3),))
CLIP = MediaLayout(
    "video", 320, 240, (MediaGroup(2, "00:00:00.000"), MediaGroup(2, "00:00:00.500"))
)
PAD = "<|media_pad|>"


def say(*parts, role="user", **fields):
    typed = tuple(TextPart(part) if isinstance(part, str) else part for part in parts)
    return Message(role=role, parts=typed, **fields)


def text(segments):
    return "".join(segment.text for segment in segments)


def body(*messages, **options):
    media = options.pop("media", ())
    options = ChatOptions(add_generation_prompt=False, **options)
    return text(render(messages, options=options, media=media))


def test_a_picture_is_one_trusted_segment_in_its_place():
    message = say("a ", MediaPart("image", "x"), " b")
    segments = render([message], media=[PICTURE])
    block = f"<|media_begin|>image 640x480<|media_content|>{PAD * 3}<|media_end|>"
    at = segments.index(Segment(block, allow_special=True))
    assert segments[at - 1 : at + 2] == [
        Segment("a ", allow_special=False),
        Segment(block, allow_special=True),
        Segment(" b", allow_special=False),
    ]


def test_a_clip_is_a_plain_timestamp_and_a_trusted_block_per_group():
    segments = render([say(MediaPart("video", "x"))], media=[CLIP])
    block = Segment(
        f"<|media_begin|>video<|media_content|>{PAD * 2}<|media_end|>", allow_special=True
    )
    at = segments.index(block)
    assert segments[at - 1 : at + 3] == [
        Segment("00:00:00.000", allow_special=False),
        block,
        Segment("00:00:00.500", allow_special=False),
        block,
    ]


def test_layouts_are_taken_in_order_across_messages_and_roles():
    other = MediaLayout("image", 1, 2, (MediaGroup(1),))
    rendered = body(
        say(MediaPart("image", "a"), role="system"),
        say(MediaPart("image", "b"), role="tool", tool_name="f"),
        media=[PICTURE, other],
    )
    assert rendered.index("640x480") < rendered.index("1x2")


@pytest.mark.parametrize(("num_parts", "num_layouts"), [(0, 1), (1, 0), (1, 2), (3, 1)])
def test_parts_and_layouts_must_come_out_even(num_parts, num_layouts):
    messages = [say(*[MediaPart("image", "x")] * num_parts)]
    with pytest.raises(
        TemplateError, match=rf"hold {num_parts} media parts, but {num_layouts} media"
    ):
        render(messages, media=[PICTURE] * num_layouts)


def test_a_layout_of_the_other_kind_is_an_error():
    with pytest.raises(
        TemplateError, match="of kind 'video', its layout of kind 'image'"
    ) as caught:
        render([say("x", MediaPart("video", "x"))], media=[PICTURE])
    assert caught.value.param == "messages[0].content[1]"


@pytest.mark.parametrize(
    "layout",
    [
        MediaLayout("image", 1, 1, ()),
        MediaLayout("image", 1, 1, (MediaGroup(1), MediaGroup(1))),
        MediaLayout("image", 1, 1, (MediaGroup(0),)),
        MediaLayout("video", 1, 1, ()),
    ],
)
def test_a_layout_without_room_for_features_is_an_error(layout):
    with pytest.raises(TemplateError):
        render([say(MediaPart(layout.kind, "x"))], media=[layout])


def test_text_never_takes_a_layout():
    spelled = "<|kimi_image_placeholder|>"
    rendered = body(say(spelled, MediaPart("image", "x")), media=[PICTURE])
    assert rendered.index(spelled) < rendered.index("640x480")


def test_image_prompts_reach_everywhere_the_release_looks():
    spelled = "<|kimi_image_placeholder|>"
    call = ToolCall(name=spelled, arguments={spelled: f"a{spelled}b"})
    messages = [
        say(spelled, role="assistant", reasoning=f"r{spelled}", tool_calls=(call,), name=spelled)
    ]
    segments = render(messages, media=ImagePrompts(("<1>", "<2>", "<3>")))
    assert [s.text for s in segments if s.text in ("<1>", "<2>", "<3>")] == ["<1>", "<2>", "<3>"]
    assert all(s.allow_special for s in segments if s.text in ("<1>", "<2>", "<3>"))
    assert text(segments).count(spelled) == 3  # names and keys are left alone


def test_image_prompts_cannot_hold_a_clip():
    for prompts in (None, ("<1>",)):
        with pytest.raises(TemplateError, match="video"):
            render([say(MediaPart("video", "x"))], media=ImagePrompts(prompts))


def test_partial_mode_leaves_the_response_open():
    messages = [say("q"), say("The an", role="assistant", name="bot", partial=True)]
    rendered = text(render(messages, options=ChatOptions(tool_choice="none")))
    assert rendered.endswith(
        'next message.<|close|>message<|sep|><|end_of_msg|><|open|>message role="assistant" '
        'name="bot"<|sep|><|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>The an'
    )


def test_partial_mode_keeps_reasoning_only_with_thinking_on():
    message = say("x", role="assistant", reasoning="why", partial=True)
    assert "think<|sep|>why<|close|>think" in body(message)
    assert "why" not in body(message, thinking=False)
    assert "think" not in body(message, thinking=False)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([say("a", role="assistant", partial=True), say("b")], "messages[0].partial"),
        ([say("a"), say("b", partial=True)], "messages[1].partial"),
        (
            [say(role="assistant", partial=True, tool_calls=(ToolCall(name="f", arguments={}),))],
            "messages[0].partial",
        ),
    ],
)
def test_partial_in_the_wrong_place_is_an_error(messages, param):
    with pytest.raises(TemplateError) as caught:
        render(messages)
    assert caught.value.param == param


def test_raw_arguments_become_a_json_element():
    call = ToolCall(name="f", arguments="{broken")
    assert '<|open|>json type="object"<|sep|>{broken<|close|>json<|sep|>' in body(
        say(role="assistant", tool_calls=(call,))
    )


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", [object()], {"a": {"b": object()}}])
def test_arguments_that_are_not_json_are_an_error(value):
    call = ToolCall(name="f", arguments={"k": value})
    with pytest.raises(TemplateError) as caught:
        render([say(role="assistant", tool_calls=(call,))])
    assert caught.value.param == "messages[0].tool_calls[0].arguments"


def nested(depth):
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


def test_declarations_and_schemas_that_are_not_json_are_errors():
    with pytest.raises(TemplateError) as caught:
        render([], tools=[{"x": nested(100_000)}])
    assert caught.value.param == "tools"
    with pytest.raises(TemplateError) as caught:
        render([], options=ChatOptions(response_format="json_schema", response_schema={1: {2}}))
    assert caught.value.param == "options.response_format"


@pytest.mark.parametrize(
    ("json_schema", "expected"),
    [
        ({"schema": {"b": 1, "a": 2}}, '{"a":2,"b":1}'),
        ({"schema": None, "name": "n"}, "null"),
        ({"json_schema": {"z": []}}, '{"z":[]}'),
        ({"type": "object"}, '{"type":"object"}'),
        ("bare", '"bare"'),
        (None, "null"),
    ],
)
def test_where_the_schema_is_looked_for(json_schema, expected):
    wanted = {"type": "json_schema", "json_schema": json_schema}
    rendered = body(response_format=wanted)
    assert rendered.endswith(
        f"schema:\n```json\n{expected}\n```<|close|>message<|sep|><|end_of_msg|>"
    )


@pytest.mark.parametrize("wanted", ["text", {"type": "text"}, {"type": "grammar"}, {}, "xml"])
def test_other_response_formats_write_nothing(wanted):
    assert body(response_format=wanted) == ""


@pytest.mark.parametrize("choice", ["auto", "any", {"type": "function", "function": {"name": "f"}}])
def test_other_tool_choices_write_nothing(choice):
    assert body(tool_choice=choice) == ""


def test_an_empty_name_is_not_written():
    assert 'name="' not in body(say("x", name=""), say("y", role="assistant", name=""))


def results(*ids):
    return [say(str(i), role="tool", tool_call_id=i, tool_name="old") for i in ids]


def test_results_are_sorted_into_call_order_run_by_run():
    calls = tuple(ToolCall(name=f"f{i}", arguments={}, id=i) for i in "abc")
    assistant = say(role="assistant", tool_calls=calls)
    messages = [assistant, *results("c", "a"), say("between"), *results("b", "a", "b")]
    ordered = order_results(messages)
    assert [index for index, _ in ordered] == [0, 2, 1, 3, 5, 4, 6]
    assert [m.tool_name for _, m in ordered if m.role == "tool"] == [f"f{x}" for x in "acabb"]


def test_a_run_with_one_stranger_is_left_alone():
    assistant = say(role="assistant", tool_calls=(ToolCall(name="f", arguments={}, id="a"),))
    messages = [assistant, *results("x", "a")]
    assert [m for _, m in order_results(messages)] == messages


def test_an_assistant_without_calls_clears_the_table():
    assistant = say(role="assistant", tool_calls=(ToolCall(name="f", arguments={}, id="a"),))
    messages = [assistant, say("no calls", role="assistant"), *results("a")]
    assert [m for _, m in order_results(messages)] == messages


def test_the_index_counts_results_since_the_assistant_message():
    calls = tuple(ToolCall(name=f"f{i}", arguments={}, id=i) for i in "ab")
    rendered = body(say(role="assistant", tool_calls=calls), *results("b"), say("x"), *results("a"))
    assert 'tool="fb" index="1"' in rendered
    assert 'tool="fa" index="2"' in rendered


def test_input_messages_are_not_changed():
    arguments = {"b": 1, "a": {"z": 1, "y": 2}}
    message = say(role="assistant", tool_calls=(ToolCall(name="f", arguments=arguments),))
    render([message], tools=[{"z": 1, "a": 2}])
    assert list(arguments) == ["b", "a"]
    assert list(arguments["a"]) == ["z", "y"]


def test_media_parts_come_in_the_order_in_which_layouts_are_taken():
    calls = tuple(ToolCall(name=f"f{i}", arguments={}, id=i) for i in "ab")
    one, two, lost = (MediaPart("image", source) for source in ("one", "two", "lost"))
    messages = [
        say(role="assistant", tool_calls=calls),
        say("second", two, role="tool", tool_call_id="b"),
        say(one, role="tool", tool_call_id="a"),
        say(lost, role="developer"),
        say(lost, role="system", tools=({},)),
    ]
    assert media_parts(messages) == [
        ("messages[2].content[0]", one),
        ("messages[1].content[1]", two),
    ]
    render(messages, media=[PICTURE] * 2)
