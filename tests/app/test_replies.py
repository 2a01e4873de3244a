"""Writing answers: chunks put together are the whole, and counts are always there."""

from __future__ import annotations

import json

from k3vl.app.replies import Choice, Chunks, Heading, completion_json, usage_json
from k3vl.types import (
    Content,
    Finish,
    Reasoning,
    TextLogprob,
    ToolCall,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    Usage,
)

USAGE = Usage(prompt_tokens=9, image_tokens=4, completion_tokens=7, reasoning_tokens=2)
CALL = ToolCall(name="look", arguments={"at": "ü"}, id="call_1")
EVENTS = [
    Reasoning("Hm, "),
    Reasoning("so."),
    Content('A "fox"\n'),
    Content("and \u2028 more."),
    ToolCallBegin(0, "call_1", "look"),
    ToolCallArguments(0, '{"at": "'),
    ToolCallArguments(0, 'ü"}'),
    ToolCallEnd(0, CALL),
    Finish("tool_calls", USAGE),
]


def parse(frames: bytes) -> list[dict]:
    lines = [line for line in frames.split(b"\n") if line]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def chunks(**options) -> Chunks:
    settings = {"include_usage": True, "num_top": None, **options}
    return Chunks(Heading.new("m"), **settings)


def test_chunks_put_together_are_the_whole() -> None:
    writer = chunks()
    frames = parse(writer.begin(0, ["odd"]) + writer.write(0, EVENTS) + writer.end())
    *most, last = frames
    deltas = [frame["choices"][0]["delta"] for frame in most]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, so."
    assert "".join(delta.get("content", "") for delta in deltas) == 'A "fox"\nand \u2028 more.'
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["id"] == "call_1"
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"at": "ü"}
    assert most[0]["k3vl"] == {"warnings": ["odd"]}
    assert most[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"]["image_tokens"] == 4
    assert all(frame["usage"] is None for frame in most)
    assert len({frame["id"] for frame in frames}) == 1


def test_without_usage_nothing_speaks_of_it() -> None:
    writer = chunks(include_usage=False)
    frames = parse(writer.write(0, EVENTS))
    assert writer.end() == b""
    assert all("usage" not in frame for frame in frames)


def test_the_whole_says_the_same() -> None:
    choice = Choice(0)
    choice.feed(EVENTS)
    reply = completion_json(Heading.new("m"), [choice], warnings=[], num_top=None)
    message = reply["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm, so."
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"at": "ü"}
    assert reply["choices"][0]["finish_reason"] == "tool_calls"


def test_reasoning_that_was_the_answer_is_not_both() -> None:
    choice = Choice(0)
    choice.feed([Reasoning("Yes."), Content("Yes.", replaces_reasoning=True)])
    message = completion_json(Heading.new("m"), [choice], warnings=[], num_top=None)["choices"][0][
        "message"
    ]
    assert message["content"] == "Yes."
    assert "reasoning_content" not in message


def test_logprobs_are_json_whatever_they_are() -> None:
    item = TextLogprob(b"\xff", float("-inf"), ((b"fox", -0.5),))
    (frame,) = parse(chunks(num_top=1).write(0, [Content("x", logprobs=(item,))]))
    (token,) = frame["choices"][0]["logprobs"]["content"]
    assert token["logprob"] == -9999.0
    assert token["bytes"] == [255]
    assert token["top_logprobs"] == [{"token": "fox", "logprob": -0.5, "bytes": list(b"fox")}]


def test_counts_of_several_answers() -> None:
    counts = usage_json([USAGE, USAGE])
    assert (counts["prompt_tokens"], counts["completion_tokens"], counts["total_tokens"]) == (
        9,
        14,
        23,
    )
    assert counts["completion_tokens_details"]["reasoning_tokens"] == 4
    empty = usage_json([])
    assert empty["prompt_tokens_details"]["cached_tokens"] == 0
