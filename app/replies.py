"""The wire format of answers: our events as chat completions, whole or in chunks.

Pure functions and small collectors; nothing here does I/O. The frequent chunk, more text of one
choice, is put together from prepared bytes; everything else is plain JSON.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from k3vl.app.sse import event
from k3vl.types import (
    Content,
    Finish,
    Reasoning,
    ToolCall,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from k3vl.types import Event, TextLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What all chunks of an answer share."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, model: str) -> Heading:
        """A fresh one."""
        return cls(id=f"chatcmpl-{uuid4().hex}", created=int(time.time()), model=model)


def dump(value: Any) -> bytes:
    """Compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


# ---------------------------------------------------------------------- parts of both


def usage_json(usages: Sequence[Usage]) -> dict[str, Any]:
    """Counts of a request; the prompt counts once, however many answers were made."""
    prompt = usages[0].prompt_tokens if usages else 0
    completion = sum(usage.completion_tokens for usage in usages)
    first = usages[0] if usages else Usage()
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": first.cached_tokens,
            "image_tokens": first.image_tokens,
            "video_tokens": first.video_tokens,
            "audio_tokens": 0,
        },
        "completion_tokens_details": {
            "reasoning_tokens": sum(usage.reasoning_tokens for usage in usages),
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def logprobs_json(items: Iterable[TextLogprob], *, top: bool) -> list[dict[str, Any]]:
    """``logprobs.content``; ``top_logprobs`` is empty where none were asked for."""
    return [
        {
            **_token(item.token, item.logprob),
            "top_logprobs": [_token(*pair) for pair in item.top] if top else [],
        }
        for item in items
    ]


def _token(data: bytes, logprob: float) -> dict[str, Any]:
    return {
        "token": data.decode("utf-8", "replace"),
        # JSON has no infinity; OpenAI writes this number for tokens that cannot come.
        "logprob": max(logprob, -9999.0),
        "bytes": list(data),
    }


def call_json(call: ToolCall) -> dict[str, Any]:
    """A finished call; arguments are a string of JSON, or what the model wrote instead."""
    arguments = call.arguments
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def error_json(
    message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The one error shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


# ---------------------------------------------------------------------- whole answers


@dataclass(slots=True)
class Choice:
    """Collects one answer."""

    index: int
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TextLogprob] = field(default_factory=list)
    reason: str = "stop"
    usage: Usage = field(default_factory=Usage)

    def feed(self, events: Iterable[Event]) -> None:
        """Take more events."""
        for item in events:
            match item:
                case Content(text, replaces, logprobs):
                    if replaces:
                        self.reasoning.clear()
                    self.content.append(text)
                    self.logprobs += logprobs
                case Reasoning(text):
                    self.reasoning.append(text)
                case ToolCallEnd(call=call):
                    self.calls.append(call)
                case Finish(reason, usage):
                    self.reason, self.usage = reason, usage or Usage()
                case _:
                    pass


def completion_json(
    heading: Heading,
    choices: Sequence[Choice],
    *,
    warnings: Sequence[str],
    num_top: int | None,
) -> dict[str, Any]:
    """A whole ``chat.completion``; ``num_top`` None: no log-probabilities were asked for."""
    return {
        "id": heading.id,
        "object": "chat.completion",
        "created": heading.created,
        "model": heading.model,
        "choices": [_choice_json(choice, num_top) for choice in choices],
        "usage": usage_json([choice.usage for choice in choices]),
        "k3vl": {"warnings": list(warnings)},
    }


def _choice_json(choice: Choice, num_top: int | None) -> dict[str, Any]:
    content, reasoning = "".join(choice.content), "".join(choice.reasoning)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content if content or not choice.calls else None,
        "refusal": None,
    }
    if reasoning:
        message["reasoning_content"] = reasoning
    if choice.calls:
        message["tool_calls"] = [call_json(call) for call in choice.calls]
    logprobs = None
    if num_top is not None:
        items = logprobs_json(choice.logprobs, top=num_top > 0)
        logprobs = {"content": items, "refusal": None}
    return {
        "index": choice.index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": choice.reason,
    }


# ---------------------------------------------------------------------- chunks


class Chunks:
    """Writes the chunks of a stream as framed events.

    Calls are numbered as they begin; a call that the model broke off has been announced by then and
    stays incomplete, as its arguments show.
    """

    def __init__(
        self,
        heading: Heading,
        *,
        include_usage: bool,
        num_top: int | None,
    ) -> None:
        """Prepare what does not change."""
        self._heading, self._include_usage = heading, include_usage
        self._num_top = num_top
        head = dump(
            {
                "id": heading.id,
                "object": "chat.completion.chunk",
                "created": heading.created,
                "model": heading.model,
            }
        )
        self._head = head[:-1] + b',"choices":[{"index":'
        tail = b',"usage":null}' if include_usage else b"}"
        self._tail = b'},"logprobs":null,"finish_reason":null}]' + tail
        self._usages: dict[int, Usage] = {}

    def begin(self, index: int, warnings: Sequence[str] = ()) -> bytes:
        """The first chunk of a choice; warnings travel with it."""
        extra = {"k3vl": {"warnings": list(warnings)}} if warnings else {}
        return self._chunk(index, {"role": "assistant", "content": ""}, extra=extra)

    def write(self, index: int, events: Iterable[Event]) -> bytes:
        """The chunks of some events, joined."""
        return b"".join([self._write(index, item) for item in events])

    def end(self) -> bytes:
        """The chunk of counts, if it was asked for; it has no choices."""
        if not self._include_usage:
            return b""
        usages = [self._usages[index] for index in sorted(self._usages)]
        return event(dump({**self._shared(), "choices": [], "usage": usage_json(usages)}))

    def _write(self, index: int, item: Event) -> bytes:
        match item:
            case Content(text, _, ()):
                return self._text(index, b'{"content":', text)
            case Content(text, _, logprobs):
                items = logprobs_json(logprobs, top=bool(self._num_top))
                return self._chunk(
                    index, {"content": text}, logprobs={"content": items, "refusal": None}
                )
            case Reasoning(text):
                return self._text(index, b'{"reasoning_content":', text)
            case ToolCallBegin(number, call_id, name):
                function = {"name": name, "arguments": ""}
                return self._call(
                    index, number, {"id": call_id, "type": "function", "function": function}
                )
            case ToolCallArguments(number, text):
                return self._call(index, number, {"function": {"arguments": text}})
            case ToolCallEnd():
                return b""
            case Finish(reason, usage):
                self._usages[index] = usage or Usage()
                return self._chunk(index, {}, finish=reason)

    def _text(self, index: int, field_head: bytes, text: str) -> bytes:
        if not text:
            return b""
        written = json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")
        middle = b',"delta":' + field_head + written
        return event(self._head + str(index).encode() + middle + self._tail)

    def _call(self, index: int, number: int, fields: Mapping[str, Any]) -> bytes:
        return self._chunk(index, {"tool_calls": [{"index": number, **fields}]})

    def _shared(self) -> dict[str, Any]:
        return {
            "id": self._heading.id,
            "object": "chat.completion.chunk",
            "created": self._heading.created,
            "model": self._heading.model,
        }

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        *,
        logprobs: Mapping[str, Any] | None = None,
        finish: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self._include_usage else {}
        return event(dump({**self._shared(), "choices": [choice], **usage, **(extra or {})}))
