"""What an endpoint is asked, and what its chunks mean; no I/O."""

from __future__ import annotations

import json

import numpy as np
import pytest

from k3vl.app.upstream.answers import AnswerReader
from k3vl.app.upstream.messages import with_urls, write_body
from k3vl.errors import BackendAnswerError
from k3vl.types import (
    EncoderItem,
    MediaGroup,
    MediaLayout,
    MediaPart,
    Message,
    ProcessedMedia,
    Request,
    TextPart,
    ToolCall,
    Usage,
)
from k3vl.xtml.render import media_parts, render

NONE = np.empty((0, 3, 1, 1), np.uint8)
URL = "data:image/jpeg;base64,"


def picture(name: str) -> ProcessedMedia:
    layout = MediaLayout("image", 30, 20, (MediaGroup(4),))
    return ProcessedMedia(layout, (EncoderItem(name, NONE, (1, 4, 4), 4),), urls=(URL + name,))


def clip(name: str, num_frames: int) -> ProcessedMedia:
    groups = tuple(MediaGroup(4, f"00:00:0{i}.000") for i in range(num_frames))
    items = tuple(EncoderItem(f"{name}{i}", NONE, (1, 4, 4), 4) for i in range(num_frames))
    urls = tuple(f"{URL}{name}{i}" for i in range(num_frames))
    return ProcessedMedia(MediaLayout("video", 30, 20, groups), items, urls=urls)


def calls(*ids: str) -> Message:
    made = tuple(ToolCall(name="look", arguments={"at": "ü"}, id=call) for call in ids)
    return Message(role="assistant", tool_calls=made)


CONVERSATION = Request(
    messages=(
        Message(
            role="user", parts=(MediaPart("video", "v"), TextPart("and"), MediaPart("image", "i"))
        ),
        calls("a", "b"),
        # Results come in another order than the calls; the prompt has them in that of the calls.
        Message(role="tool", tool_call_id="b", parts=(MediaPart("image", "second"),)),
        Message(role="tool", tool_call_id="a", parts=(MediaPart("image", "first"),)),
    )
)  # fmt: skip
MEDIA = [clip("f", 6), picture("i"), picture("first"), picture("second")]


def sources(message: Message) -> list[str]:
    return [
        part.text if isinstance(part, TextPart) else str(part.source).removeprefix(URL)
        for part in message.parts
    ]


def test_frames_stand_in_groups_behind_their_times() -> None:
    request, sent = with_urls(CONVERSATION, MEDIA, 4)
    assert sources(request.messages[0]) == [
        *("00:00:00.000", "f0", "f1", "f2", "f3"),
        *("00:00:04.000", "f4", "f5", "and", "i"),
    ]
    assert sources(request.messages[2]) == ["second"]
    assert sources(request.messages[3]) == ["first"]
    assert [item.urls[0].removeprefix(URL) for item in sent] == [
        *("f0", "f1", "f2", "f3", "f4", "f5", "i", "first", "second")
    ]
    order = [str(part.source).removeprefix(URL) for _, part in media_parts(request.messages)]
    assert order == [item.urls[0].removeprefix(URL) for item in sent]
    render(request.messages, media=[item.layout for item in sent])  # as the endpoint will


@pytest.mark.parametrize("num_frames", [1, 6])
def test_whole_clips_stay_clips(num_frames: int) -> None:
    whole = ProcessedMedia(
        clip("f", num_frames).layout, clip("f", num_frames).items, urls=(URL + "c",)
    )
    asked = Request(messages=(Message(role="user", parts=(MediaPart("video", "v"),)),))
    request, sent = with_urls(asked, [whole], None)
    assert request.messages[0].parts == (MediaPart("video", URL + "c"),)
    assert sent == [whole]


def test_the_body_is_json_with_the_media_in_their_places() -> None:
    request, _ = with_urls(CONVERSATION, MEDIA, 4)
    body = json.loads(write_body({"model": 'a "b"'}, request.messages))
    assert body["model"] == 'a "b"'
    first, calling, second, third = body["messages"]
    assert [part["type"] for part in first["content"]] == [
        *("text", "image_url", "image_url", "image_url", "image_url"),
        *("text", "image_url", "image_url", "text", "image_url"),
    ]
    assert first["content"][1] == {"type": "image_url", "image_url": {"url": URL + "f0"}}
    assert first["content"][-1]["image_url"]["url"] == URL + "i"
    assert calling["content"] is None
    assert json.loads(calling["tool_calls"][0]["function"]["arguments"]) == {"at": "ü"}
    assert second["content"][0]["image_url"]["url"] == URL + "second"
    assert third["tool_call_id"] == "a"
    assert write_body({}, (Message(role="user"),)) == b'{"messages":[{"role":"user","content":""}]}'


def read(*chunks: dict, num_answers: int = 1) -> list:
    reader = AnswerReader(num_answers, Usage(image_tokens=7))
    batches = [batch for chunk in chunks for batch in reader.feed(json.dumps(chunk))]
    return [*batches, *reader.finish()]


def delta(index: int = 0, finish: str | None = None, **fields) -> dict:
    return {"choices": [{"index": index, "delta": fields, "finish_reason": finish}]}


def test_several_answers_share_the_counts_of_one() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 8}}
    batches = read(
        delta(0, content="a"), delta(1, content="b"), delta(1, "length"), delta(0, "stop"), usage,
        num_answers=2,
    )  # fmt: skip
    assert [(index, events[-1].reason) for index, events in batches[-2:]] == [
        (0, "stop"),
        (1, "length"),
    ]
    counts = [events[-1].usage for _, events in batches[-2:]]
    assert [count.completion_tokens for count in counts] == [8, 0]
    assert [count.prompt_tokens for count in counts] == [5, 5]
    assert counts[0].image_tokens == 7


def test_calls_are_numbered_as_they_come_and_whole_at_the_end() -> None:
    def piece(index: int, **function) -> dict:
        return delta(tool_calls=[{"index": index, "function": function}])

    batches = read(
        piece(3, name="look", arguments=""),
        piece(3, arguments='{"a"'),
        piece(3, arguments=": 1}"),
        piece(5, name="wait"),
        delta(finish="tool_calls"),
    )
    *ends, finish = batches[-1][1]
    assert [(end.index, end.call.name, end.call.arguments) for end in ends] == [
        (0, "look", '{"a": 1}'),
        (1, "wait", "{}"),
    ]
    assert ends[0].call.id != ends[1].call.id
    assert finish.reason == "tool_calls"


def test_an_answer_without_an_end_is_an_error() -> None:
    with pytest.raises(BackendAnswerError):
        read(delta(0, "stop"), num_answers=2)
