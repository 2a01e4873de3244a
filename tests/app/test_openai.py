"""Reading requests: what is taken, what is refused, and where the message points."""

from __future__ import annotations

from dataclasses import replace

import pytest

from k3vl.app.openai import Limits, read_call
from k3vl.errors import RequestError
from k3vl.types import ChatOptions, MediaPart, SamplingParams, TextPart

LIMITS = Limits(max_images=3, max_videos=1, max_messages=9)
OPTIONS = ChatOptions(thinking=True, thinking_effort="max")
SAMPLING = SamplingParams(temperature=1.0, top_p=0.95)
USER = {"role": "user", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be kind."}
RESULT = {"role": "tool", "content": "x"}


def tool(name: str = "look", **function) -> dict:
    return {"type": "function", "function": {"name": name, **function}}


def read(options: ChatOptions = OPTIONS, **fields):
    body = {"model": "m", "messages": [USER], **fields}
    return read_call(body, limits=LIMITS, options=options, sampling=SAMPLING)


def calling(*ids: str) -> dict:
    calls = [
        {"id": call, "type": "function", "function": {"name": "look", "arguments": "{}"}}
        for call in ids
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def test_defaults_are_the_checkpoints() -> None:
    call = read()
    assert call.request.options == OPTIONS
    assert call.request.sampling == replace(SAMPLING, max_tokens=LIMITS.default_max_tokens)
    assert (call.num_choices, call.stream, call.include_usage) == (1, False, False)


def test_the_developer_is_the_system() -> None:
    call = read(messages=[{"role": "developer", "content": "Be kind."}, USER])
    assert call.request.messages[0].role == "system"


@pytest.mark.parametrize(
    ("fields", "thinking", "effort"),
    [
        ({"reasoning_effort": "low"}, True, "low"),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "low"}, False, None),
        ({"thinking": {"effort": "high"}, "reasoning_effort": "low"}, True, "high"),
        ({"chat_template_kwargs": {"thinking": False}}, False, None),
        ({"chat_template_kwargs": {"thinking_effort": "low"}}, True, "low"),
    ],
)  # fmt: skip
def test_thinking_in_all_its_spellings(fields, thinking, effort) -> None:
    options = read(**fields).request.options
    assert (options.thinking, options.thinking_effort) == (thinking, effort)


def test_an_effort_turns_thinking_on() -> None:
    off = ChatOptions(thinking=False)
    assert read(off).request.options.thinking is False
    assert read(off, reasoning_effort="low").request.options.thinking is True
    on = read(off, thinking={"type": "enabled"}).request.options
    assert (on.thinking, on.thinking_effort) == (True, "max")


def test_media_come_in_both_forms_and_with_detail() -> None:
    content = [
        {"type": "image_url", "image_url": "data:,a"},
        {"type": "image_url", "image_url": {"url": "data:,b", "detail": "low"}},
        {"type": "video_url", "video_url": {"url": "data:,c"}},
        {"type": "text", "text": "x"},
    ]
    call = read(messages=[{"role": "user", "content": content}])
    assert call.request.messages[0].parts == (
        MediaPart("image", "data:,a"),
        MediaPart("image", "data:,b", "low"),
        MediaPart("video", "data:,c"),
        TextPart("x"),
    )


def test_sampling_fields_are_taken() -> None:
    call = read(
        temperature=0,
        top_p=0.5,
        top_k=7,
        seed=-1,
        stop="x",
        logprobs=True,
        top_logprobs=3,
        max_tokens=5,
        max_completion_tokens=6,
    )
    sampling = call.request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 0.5, 7)
    assert (sampling.stop, sampling.logprobs, sampling.max_tokens) == (("x",), 3, 6)
    assert sampling.seed is not None
    assert sampling.seed >= 0


def test_what_changes_nothing_is_accepted() -> None:
    read(user="u", metadata={"a": "b"}, store=False, service_tier="auto", prompt_cache_key="k")
    read(frequency_penalty=0, presence_penalty=0.0, logit_bias={}, modalities=["text"])
    assert read(cache_salt="tenant").request.sampling.cache_salt == "tenant"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"surprise": 1}, "surprise"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 99}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x", "y" * 300]}, "stop[1]"),
        ({"stop": "y" * 300}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop[0]"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"reasoning_effort": "medium"}, "reasoning_effort"),
        ({"reasoning_effort": ""}, "reasoning_effort"),
        ({"thinking": {"effort": "none"}}, "thinking.effort"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"functions": []}, "functions"),
        ({"audio": {}}, "audio"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"messages": [USER] * 10}, "messages"),
    ],
)
def test_fields_that_are_refused(fields, param) -> None:
    with pytest.raises(RequestError) as caught:
        read(**fields)
    assert caught.value.param.startswith(param.partition(".list")[0])


@pytest.mark.parametrize("name", ["", "1look", "lo@ok", "look it", "x" * 257, None, 5])
def test_tool_names_that_are_refused(name) -> None:
    for fields in (
        {"tools": [tool(name)]},
        {"messages": [{"role": "system", "tools": [tool(name)]}, USER]},
    ):
        with pytest.raises(RequestError) as caught:
            read(**fields)
        assert caught.value.param.endswith("tools[0].function.name")


@pytest.mark.parametrize("name", ["x", "look_it", "look-it", "mcp.look", "x" * 256, "ansehen_ü"])
def test_tool_names_that_are_taken(name) -> None:
    read(tools=[tool(name)])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": tool("other"), "tools": [tool()]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [tool()]}, "tool_choice"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": [{"type": "web"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"messages": [{**USER, "tools": [tool()]}]}, "messages[0].tools"),
        ({"messages": [{**SYSTEM, "tools": [tool()]}]}, "messages[0].content"),
        ({"messages": [{"role": "system", "tools": {}}]}, "messages[0].tools"),
        (
            {"tools": [tool()], "messages": [{"role": "system", "tools": [tool()]}, USER]},
            "messages[0].tools[0].function.name",
        ),
    ],
)  # fmt: skip
def test_tools_that_are_refused(fields, param) -> None:
    with pytest.raises(RequestError) as caught:
        read(**fields)
    assert caught.value.param.startswith(param)


def test_tools_on_the_way_allow_required() -> None:
    declaring = {"role": "system", "content": "", "tools": [tool("later")]}
    call = read(messages=[declaring, USER], tool_choice="required")
    assert call.request.messages[0].tools == (tool("later"),)
    read(messages=[declaring, USER], tool_choice=tool("later"))
    read(tool_choice="none")
    read(tool_choice="auto")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "critic", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{**USER, "content": [{"type": "video_url"}]}], "messages[0].content[0].video_url"),
        ([USER, RESULT], "messages[1].tool_call_id"),
        ([USER, {**RESULT, "tool_call_id": "c"}], "messages[1].tool_call_id"),
        (
            [USER, calling("a"), {"role": "tool", "content": "x", "tool_call_id": "b"}],
            "messages[2].tool_call_id",
        ),
        ([{**USER, "partial": True}], "messages[0].partial"),
    ],
)  # fmt: skip
def test_messages_that_are_refused(messages, param) -> None:
    with pytest.raises(RequestError) as caught:
        read(messages=messages)
    assert caught.value.param == param


def test_results_answer_the_calls_before_them() -> None:
    results = [{"role": "tool", "content": "x", "tool_call_id": call} for call in ("b", "a")]
    call = read(messages=[USER, calling("a", "b"), *results])
    assert len(call.request.messages) == 4


def test_broken_arguments_in_history_are_kept() -> None:
    made = calling("a")
    made["tool_calls"][0]["function"]["arguments"] = '{"x": '
    call = read(messages=[USER, made, {"role": "tool", "content": "x", "tool_call_id": "a"}])
    assert call.request.messages[1].tool_calls[0].arguments == '{"x": '


def test_media_are_counted_over_all_messages() -> None:
    part = {"type": "image_url", "image_url": "data:,a"}
    with pytest.raises(RequestError, match="4 images in messages 0, 2") as caught:
        read(
            messages=[
                {"role": "user", "content": [part, part]},
                {"role": "assistant", "content": "x"},
                {"role": "user", "content": [part, part]},
            ]
        )
    assert caught.value.code == "too_many_images"


@pytest.mark.parametrize(
    ("text", "warned"),
    [
        ('[{"type": "text", "text": "x"}]', True),
        (' [{"type":"image_url","image_url":{"url":"data:"}}] ', True),
        ("[1, 2]", False),
        ('[{"kind": "type"}]', False),
        ('["type"', False),
        ("A list: [] of type", False),
    ],
)
def test_a_serialised_list_is_noticed(text: str, warned: bool) -> None:
    call = read(messages=[{"role": "user", "content": text}])
    assert call.request.messages[0].parts == (TextPart(text),)
    assert bool(call.warnings) == warned


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"stop": ["x"] * 17}, "at most 16 items"),
        ({"stop": ["y" * 300]}, "at most 256 characters"),
        ({"stop": "y" * 300}, "at most 256 characters"),
        ({"tool_choice": "some"}, "'auto', 'none' or 'required'"),
    ],
)
def test_what_is_wrong_with_one_of_several_kinds(fields, said) -> None:
    with pytest.raises(RequestError, match=said):
        read(**fields)


def test_messages_never_hold_values() -> None:
    secret = "sk-secret-value"
    for fields in ({"temperature": secret}, {"tool_choice": secret}, {"seed": secret}):
        with pytest.raises(RequestError) as caught:
            read(**fields)
        assert secret not in str(caught.value)
