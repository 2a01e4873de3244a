"""The released encoder's reading of odd messages and options, through ``render_record``."""

from __future__ import annotations

import pytest

from k3vl.xtml import render_record

MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")


def written(messages, tools=None, **options):
    """The prompt as one string, without the stub."""
    options = {"add_generation_prompt": False, **options}
    result = render_record({"messages": messages, "tools": tools, "options": options})
    assert "error" not in result, result
    return "".join(segment["text"] for segment in result["segments"])


def body(message, **options):
    """What one user message holds between its tags."""
    text = written([{"role": "user", **message}], **options)
    head, tail = '<|open|>message role="user"<|sep|>', "<|close|>message<|sep|><|end_of_msg|>"
    assert text.startswith(head)
    assert text.endswith(tail)
    return text[len(head) : -len(tail)]


@pytest.mark.parametrize(
    ("name", "attribute"),
    [
        (7, "7"),
        (1.5, "1.5"),
        (True, "True"),
        (["a", None], "['a', None]"),
        ({"a": "b&"}, "{'a': 'b&amp;'}"),
    ],
)
@pytest.mark.parametrize("role", ["user", "system", "assistant"])
def test_names_that_are_no_strings_are_stringified(role, name, attribute):
    text = written([{"role": role, "name": name}])
    assert text.startswith(f'<|open|>message role="{role}" name="{attribute}"<|sep|>')


@pytest.mark.parametrize("name", [None, "", 0, False, [], {}])
def test_names_that_are_not_truthy_are_left_out(name):
    assert body({"name": name, "content": "x"}) == "x"


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "text", "text": None}, "None"),
        ({"type": "text", "text": 5}, "5"),
        ({"type": "text", "text": [1]}, "[1]"),
        ({"type": None, "text": "x"}, "x"),
        ({"type": ["image"], "text": "x"}, "x"),
        ({"type": "video", "text": "x"}, "x"),
        ({"type": "video_url", "text": "x", "video_url": "y"}, "x"),
        ({"type": "text", "text": ""}, ""),
    ],
)
def test_any_part_with_a_text_is_text(part, text):
    assert body({"content": [part]}) == text


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image_url"},
        {"type": "image", "image": None},
        {"type": "image_url", "image_url": None},
        {"type": "image_url", "image_url": ""},
        {"type": "image_url", "image_url": {}},
        {"type": "image_url", "image_url": {"url": None}},
        {"type": "image", "text": "not written"},
    ],
)
def test_a_picture_takes_its_prompt_whatever_its_source(part):
    assert body({"content": [part]}, image_prompts=["P"]) == "P"
    assert body({"content": [part]}) == "<|kimi_image_placeholder|>"


@pytest.mark.parametrize("content", [3, True, {"a": 1}, [None], ["x"], [{}], [{"text": "x"}]])
def test_content_that_the_release_fails_on_is_an_error(content):
    assert "error" in render_record({"messages": [{"role": "user", "content": content}]})


@pytest.mark.parametrize("role", [None, 5, "", "developer", ["user"], {}])
def test_messages_of_any_other_role_are_dropped_unread(role):
    assert written([{"role": role, "content": 3, "tool_calls": "x", "partial": 1}]) == ""


def test_an_item_that_is_no_message_ends_a_run_of_results():
    calls = [{"id": str(n), "function": {"name": f"f{n}"}} for n in range(2)]
    results = [{"role": "tool", "tool_call_id": str(n), "content": f"r{n}"} for n in (1, 0)]
    assistant = {"role": "assistant", "tool_calls": calls}
    joined = written([assistant, *results])
    assert joined.index("r0") < joined.index("r1")
    parted = written([assistant, results[0], None, results[1]])
    assert parted.index("r1") < parted.index("r0")
    assert 'tool="f1" index="1"' in parted


@pytest.mark.parametrize(("reasoning", "text"), [(5, "5"), (["a"], "['a']"), (True, "True")])
def test_reasoning_is_stringified(reasoning, text):
    for key in ("reasoning_content", "reasoning"):
        message = {"role": "assistant", key: reasoning}
        assert f"<|open|>think<|sep|>{text}<|close|>think" in written([message])
        assert text not in written([message], thinking=False)


def test_ids_and_tool_names_of_any_type_are_compared_and_written_as_text():
    for call_id, answer_id in ((7, "7"), ("7", 7), ([1], [1]), (True, "True")):
        calls = [{"id": call_id, "function": {"name": "f", "arguments": {}}}]
        result = {"role": "tool", "tool_call_id": answer_id, "tool": "stale", "content": "r"}
        assert 'tool="f" index="1"' in written([{"role": "assistant", "tool_calls": calls}, result])
    for tool, text in ((7, "7"), (["t"], "['t']"), (False, "False")):
        assert f'tool="{text}" index="1"' in written([{"role": "tool", "tool": tool}])
    assert 'role="tool" tool="" index="1"' in written([{"role": "tool", "tool": "", "name": "n"}])


def test_a_null_id_hides_the_other_id():
    calls = [{"id": i, "function": {"name": n}} for i, n in (("x", "f"), ("a", "g"))]
    result = {"role": "tool", "tool_call_id": None, "id": "a"}
    assert 'tool="f" index="1"' in written([{"role": "assistant", "tool_calls": calls}, result])


@pytest.mark.parametrize(("name", "text"), [(7, "7"), (None, "None"), ("", ""), (["f"], "['f']")])
def test_names_of_calls_are_stringified(name, text):
    for call in ({"name": name}, {"function": {"name": name, "arguments": None}}):
        expected = f'<|open|>call tool="{text}" index="1"<|sep|><|close|>call'
        assert expected in written([{"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize(
    "calls", ["x", 3, {"a": 1}, [None], [{}], [{"function": None, "name": "f"}], [{"function": {}}]]
)
def test_calls_that_the_release_fails_on_are_errors(calls):
    record = {"messages": [{"role": "assistant", "tool_calls": calls}]}
    assert "error" in render_record(record)
    record["messages"][0]["role"] = "user"
    assert "segments" in render_record(record)


def test_declarations_are_written_whatever_they_hold():
    tools = [None, 3, "x", [{"b": 1, "a": float("nan")}]]
    fenced = '```json\n[null,3,"x",[{"a":NaN,"b":1}]]\n```'
    assert fenced in written([], tools)
    assert fenced in written([{"role": "system", "tools": tools, "content": 3}])
    for empty in ({}, "", 0, False, []):
        assert written([], empty) == ""
        assert "## New" not in written([{"role": "system", "tools": empty}])


def test_placeholders_take_prompts_in_client_text_alone():
    spelled = "<|kimi_image_placeholder|>"
    call = {"function": {"name": spelled, "arguments": {spelled: spelled, "o": [spelled]}}}
    broken = {"function": {"name": "f", "arguments": "{" + spelled}}
    message = {
        "role": "assistant",
        "name": spelled,
        "reasoning": spelled,
        "content": spelled,
        "tool_calls": [call, broken],
    }
    schema = {"type": "json_schema", "json_schema": {"schema": spelled}}
    prompts = ["P1", "P2", "P3", "P4", "P5"]
    text = written([message], [spelled], response_format=schema, image_prompts=prompts)
    assert text.count(spelled) == 5  # declaration, name, tool, key, schema
    assert [text.index(prompt) for prompt in prompts] == sorted(map(text.index, prompts))


@pytest.mark.parametrize("options", [{"extra": 1}, {"preserve_thinking": True}, {"rule": "R1"}])
def test_unknown_options_are_ignored(options):
    assert body({"content": "x"}, **options) == "x"


@pytest.mark.parametrize("value", [3, True, [], ["required"], {"type": "required"}, "other"])
def test_choices_and_formats_of_another_shape_say_nothing(value):
    assert body({"content": "x"}, tool_choice=value, response_format=value) == "x"


def test_effort_is_looked_at_only_while_thinking():
    assert body({"content": "x"}, thinking=False, thinking_effort=["bad"]) == "x"
    for effort in (3, ["max"], False, "", "MAX"):
        options = {"thinking_effort": effort}
        assert "error" in render_record({"messages": [], "options": options})


@pytest.mark.parametrize(
    ("json_schema", "schema"),
    [
        ({"schema": {"b": 1, "a": 2}, "json_schema": 3}, '{"a":2,"b":1}'),
        ({"schema": None, "json_schema": 3}, "null"),
        ({"json_schema": {"b": 1}, "name": "n"}, '{"b":1}'),
        ({"name": "n", "a": 1}, '{"a":1,"name":"n"}'),
        ("text", '"text"'),
        (False, "false"),
        (None, "null"),
    ],
)
def test_where_the_schema_is_looked_for(json_schema, schema):
    wanted = {"type": "json_schema", "json_schema": json_schema}
    assert f"```json\n{schema}\n```" in written([], response_format=wanted)
    assert "```json\n[1]\n```" in written([], response_format=wanted, response_schema=[1])
    assert "```json\nnull\n```" in written([], response_format=wanted, response_schema=None)


def test_a_bare_format_takes_a_given_schema():
    assert "```json\nnull\n```" in written([], response_format="json_schema")
    assert "```json\n0\n```" in written([], response_format="json_schema", response_schema=0)
    assert written([], response_format="text", response_schema={"a": 1}) == ""


def test_nothing_a_client_sends_is_special():
    hostile = "".join(MARKERS)
    message = {
        "role": "assistant",
        "name": [hostile],
        "content": [{"type": hostile, "text": [hostile]}],
        "reasoning": {hostile: hostile},
        "tool_calls": [{"name": [hostile], "arguments": {hostile: {hostile: hostile}}}],
    }
    record = {"messages": [message], "tools": [hostile], "options": {"tool_choice": hostile}}
    for segment in render_record(record)["segments"]:
        assert segment["allow_special"] == (segment["text"] in MARKERS)
