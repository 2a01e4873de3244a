"""The JSON border: what counts, what is stringified, and where errors point."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3vl.errors import TemplateError
from k3vl.types import MediaPart, Message, TextPart, ToolCall
from k3vl.xtml import parse_messages, parse_tools


def one(**fields):
    return parse_messages([fields])[0]


def user(*parts):
    return one(role="user", content=list(parts)).parts


def calls(*items):
    return one(role="assistant", tool_calls=list(items)).tool_calls


def test_items_that_are_not_mappings_are_skipped_but_keep_their_place_in_errors():
    with pytest.raises(TemplateError) as caught:
        parse_messages(["junk", None, {"content": "x"}])
    assert caught.value.param == "messages[2].role"


def test_typed_messages_among_mappings_are_kept():
    rules = Message(role="system", parts=(TextPart("rules"),))
    question = Message(role="user", parts=(TextPart("hi"),))
    assert parse_messages([rules, None, {"role": "user", "content": "hi"}]) == (rules, question)


@pytest.mark.parametrize("messages", [None, "hi", {"role": "user"}, b"x", 3])
def test_messages_must_be_a_list(messages):
    with pytest.raises(TemplateError) as caught:
        parse_messages(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("kind", ["image_url", "video_url", "image", "video"])
def test_media_urls_come_bare_or_in_an_object(kind):
    media = "video" if kind.startswith("video") else "image"
    expected = (MediaPart(media, "data:,x"), MediaPart(media, "data:,x", "high"))
    part = {"type": kind, kind: "data:,x"}
    assert user(part, {"type": kind, kind: {"url": "data:,x", "detail": "high"}}) == expected


def test_an_unknown_detail_is_refused():
    with pytest.raises(TemplateError) as caught:
        user({"type": "image_url", "image_url": {"url": "data:,x", "detail": "best"}})
    assert caught.value.param == "messages[0].content[0].image_url.detail"


def test_opened_media_pass_through():
    import PIL.Image

    picture = PIL.Image.new("RGB", (1, 1))
    for source in (b"bytes", Path("clip.mp4"), picture):
        (part,) = user({"type": "image", "image": source})
        assert part.source is source


def test_an_image_without_a_source_is_an_open_slot():
    assert user({"type": "image"}, {"type": "video"}) == (
        MediaPart("image", ""),
        MediaPart("video", ""),
    )


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url"}, "image_url"),
        ({"type": "image_url", "image_url": None}, "image_url"),
        ({"type": "image_url", "image_url": b"x"}, "image_url"),
        ({"type": "image_url", "image_url": {"url": 3}}, "image_url.url"),
        ({"type": "image_url", "image_url": {}}, "image_url.url"),
        ({"type": "video_url", "video_url": {"url": ""}}, "video_url.url"),
        ({"type": "image", "image": None}, "image"),
        ({"type": "image", "image": 7}, "image"),
        ({"type": "text"}, "text"),
        ({"type": "text", "text": None}, "text"),
        ({"type": "input_audio", "audio": "x"}, "text"),
        ({"text": "x"}, "type"),
        ({"type": 1, "text": "x"}, "type"),
    ],
)
def test_broken_parts_are_named(part, param):
    with pytest.raises(TemplateError) as caught:
        user({"type": "text", "text": "fine"}, part)
    assert caught.value.param == f"messages[0].content[1].{param}"


@pytest.mark.parametrize("content", [3, {"type": "text", "text": "x"}, True])
def test_content_of_another_kind_is_an_error(content):
    with pytest.raises(TemplateError) as caught:
        one(role="user", content=content)
    assert caught.value.param == "messages[0].content"


def test_a_part_that_is_a_string_is_an_error():
    with pytest.raises(TemplateError) as caught:
        user("text")
    assert caught.value.param == "messages[0].content[0]"


def test_unknown_part_types_with_text_are_text():
    assert user({"type": "input_text", "text": "a"}, {"type": "x", "text": 5}) == (
        TextPart("a"),
        TextPart("5"),
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reasoning_content": "main", "reasoning": "alias"}, "main"),
        ({"reasoning_content": "", "reasoning": "alias"}, "alias"),
        ({"reasoning_content": None, "reasoning": "alias"}, "alias"),
        ({"reasoning_content": " \n", "reasoning": "alias"}, " \n"),
        ({"reasoning": ""}, None),
        ({"reasoning_content": 5}, "5"),
    ],
)
def test_which_reasoning_counts(fields, expected):
    assert one(role="assistant", **fields).reasoning == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("", None), (None, None), (0, None), (7, "7"), (True, "True")]
)
def test_names_are_stringified_when_truthy(name, expected):
    assert one(role="user", name=name).name == expected


def test_a_name_that_is_a_list_is_an_error():
    with pytest.raises(TemplateError) as caught:
        one(role="user", name=["x"])
    assert caught.value.param == "messages[0].name"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (None, {}),
        ("", {}),
        (" \n", {}),
        ({"a": 1}, {"a": 1}),
        ('{"a":1,"a":2}', {"a": 2}),
        ('{"a": ', '{"a": '),
        ("[" * 100_000, "[" * 100_000),
        ('{"n": ' + "9" * 5000 + "}", '{"n": ' + "9" * 5000 + "}"),
    ],
)
def test_arguments_are_an_object_or_the_raw_text(arguments, expected):
    assert calls({"function": {"name": "f", "arguments": arguments}})[0].arguments == expected


@pytest.mark.parametrize("arguments", ["[1]", "3", '"x"', "null", [1], 3, True])
def test_arguments_of_another_kind_are_an_error(arguments):
    with pytest.raises(TemplateError) as caught:
        calls({"function": {"name": "f", "arguments": arguments}})
    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"


def test_calls_come_nested_or_flat_and_ids_are_strings():
    nested = {"id": 7, "function": {"name": "f", "arguments": {}, "_xtml_json_block": "evil"}}
    flat = {"name": "g", "_xtml_json_block": "evil"}
    assert calls(nested, flat) == (
        ToolCall(name="f", arguments={}, id="7"),
        ToolCall(name="g", arguments={}),
    )


@pytest.mark.parametrize(
    ("call", "param"),
    [
        ("f", ""),
        ({"function": "f"}, ".function"),
        ({"function": {}}, ".function.name"),
        ({"arguments": {}}, ".name"),
    ],
)
def test_broken_calls_are_named(call, param):
    with pytest.raises(TemplateError) as caught:
        calls(call)
    assert caught.value.param == f"messages[0].tool_calls[0]{param}"


def test_tool_calls_must_be_a_list():
    with pytest.raises(TemplateError):
        one(role="assistant", tool_calls={"name": "f"})


def test_a_result_takes_its_tool_from_the_first_field_that_is_there():
    assert one(role="tool", tool="a", name="b").tool_name == "a"
    assert one(role="tool", name="b").tool_name == "b"
    assert one(role="tool", tool=None, name="b").tool_name is None
    assert one(role="tool", id=7).tool_call_id == "7"
    assert one(role="tool", tool_call_id="x", id="y").tool_call_id == "x"


def test_dynamic_tools_hide_the_content():
    message = one(role="system", content="lost", tools=[{"type": "function"}])
    assert (message.parts, message.tools) == ((), ({"type": "function"},))
    assert one(role="system", content="kept", tools=[]).parts == (TextPart("kept"),)


@pytest.mark.parametrize("tools", [{"type": "function"}, "x", 3])
def test_tools_must_be_a_list_of_objects(tools):
    with pytest.raises(TemplateError):
        parse_tools(tools)
    with pytest.raises(TemplateError) as caught:
        parse_tools([{}, tools if isinstance(tools, str) else "x"])
    assert caught.value.param == "tools[1]"


def test_partial_belongs_to_assistant_messages():
    assert one(role="assistant", content="I", partial=True).partial
    for fields in ({"role": "user", "partial": True}, {"role": "assistant", "partial": "yes"}):
        with pytest.raises(TemplateError) as caught:
            one(**fields)
        assert caught.value.param == "messages[0].partial"


def test_any_other_object_as_a_picture_is_an_error():
    with pytest.raises(TemplateError) as caught:
        user({"type": "image", "image": object()})
    assert caught.value.param == "messages[0].content[0].image"
