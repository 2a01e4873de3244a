"""One JSON record in, one out; nonsense gives an error record, never an exception."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3vl.xtml import parse_record, render_record

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (None, "a record must be an object, not a NoneType"),
        ([], "a record must be an object"),
        ({}, "the record has no 'messages'"),
        ({"messages": None}, "messages must be a list"),
        ({"messages": [USER], "tools": {"a": 1}}, "tools must be a list"),
        ({"messages": [USER], "options": []}, "options must be an object"),
        ({"messages": [USER], "options": {"thinking_effort": 3}}, "options.thinking_effort cannot"),
        ({"messages": [USER], "options": {"image_prompts": "x"}}, "options.image_prompts must be"),
        ({"messages": [USER], "options": {"image_prompts": [1]}}, "options.image_prompts must be"),
        ({"messages": [{"content": "x"}]}, "messages[0].role is missing"),
    ],
)
def test_records_that_cannot_be_rendered(record, error):
    (message,) = render_record(record).values()
    assert message.startswith(error)


@pytest.mark.parametrize(
    ("record", "error"),
    [
        ("x", "a record must be an object"),
        ({}, "the record has no 'pieces'"),
        ({"pieces": "x"}, "pieces must be a list"),
        ({"pieces": [["x", False], ["y"]]}, "pieces[1] must be [text, is_control]"),
        ({"pieces": [["x", 1]]}, "pieces[0] must be"),
        ({"pieces": ["xy"]}, "pieces[0] must be"),
        ({"pieces": [], "options": {"engine_finish": "eos"}}, "options.engine_finish must be"),
        ({"pieces": [], "options": {"engine_finish": []}}, "options.engine_finish must be"),
    ],
)
def test_records_that_cannot_be_parsed(record, error):
    (message,) = parse_record(record).values()
    assert message.startswith(error)


def test_null_options_are_absent_options():
    names = ["thinking", "thinking_effort", "tool_choice", "response_format", "response_schema"]
    nulls = dict.fromkeys([*names, "add_generation_prompt", "image_prompts"])
    assert render_record({"messages": [USER], "options": nulls}) == render_record(
        {"messages": [USER], "tools": None, "options": None}
    )
    assert parse_record({"pieces": [["r", False]], "options": {"thinking": None}}) == {
        "reasoning": "r",
        "content": "",
        "tool_calls": [],
        "finish": "stop",
    }


def test_unknown_options_are_ignored():
    options = {"thinking": False, "tools_declared": False, "rule": "R19"}
    assert parse_record({"pieces": [["A", False]], "options": options})["content"] == "A"


def test_a_clip_is_refused_where_only_image_prompts_can_be_given():
    content = [{"type": "video_url", "video_url": "data:,x"}]
    error = render_record({"messages": [{"role": "user", "content": content}]})["error"]
    assert error == "messages[0].content[0].text is missing"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        "role",
        "content",
        "name",
        "tools",
        "tool_calls",
        "function",
        "arguments",
        "type",
        "text",
        "image_url",
        "url",
        "tool_call_id",
        "tool",
        "partial",
        "reasoning",
        "id",
    ]
)
WORDS = st.sampled_from(["user", "assistant", "system", "tool", "text", "image", "{}", "[", "x"])
SHAPED = st.recursive(
    WORDS | JSON,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=5),
    max_leaves=20,
)
MESSAGE = st.fixed_dictionaries({"role": WORDS}, optional={"content": SHAPED, "tool_calls": SHAPED})


@settings(max_examples=60)
@given(
    record=st.fixed_dictionaries(
        {"messages": st.lists(MESSAGE | SHAPED, max_size=4)},
        optional={"tools": SHAPED, "options": SHAPED},
    )
)
def test_any_record_gives_segments_or_an_error(record):
    result = render_record(record)
    assert list(result) in (["segments"], ["error"])
    json.dumps(result)


@settings(max_examples=100)
@given(record=JSON | st.fixed_dictionaries({"pieces": JSON}, optional={"options": JSON}))
def test_any_record_gives_an_answer_or_an_error(record):
    result = parse_record(record)
    assert list(result) in (["reasoning", "content", "tool_calls", "finish"], ["error"])


def test_deep_arguments_do_not_break_the_record():
    deep = "[" * 900 + "]" * 900
    pieces = [
        ["<|open|>", True], ["tools", False], ["<|sep|>", True],
        ["<|open|>", True], ['call tool="f"', False], ["<|sep|>", True],
        ["<|open|>", True], ['argument key="a" type="array"', False], ["<|sep|>", True],
        [deep, False],
        ["<|close|>", True], ["argument", False], ["<|sep|>", True],
        ["<|close|>", True], ["call", False], ["<|sep|>", True],
    ]  # fmt: skip
    (call,) = parse_record({"pieces": pieces})["tool_calls"]
    assert json.loads(call["arguments"]) == {"a": deep}
