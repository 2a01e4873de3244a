"""The chunks of an endpoint's stream, read into our events. No I/O.

Endpoints differ in what they add and leave out; what is read here is what OpenAI, Moonshot, SGLang
and vLLM send. What cannot be an answer is an error, never a guess.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pydantic import BaseModel, Field, ValidationError

from k3vl.errors import BackendAnswerError
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

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k3vl.types import Event, FinishReason

    Batch = tuple[int, list[Event]]

MAX_WORDS = 300
"""Length of an endpoint's own words in our messages."""


class _Function(BaseModel):
    name: str | None = None
    arguments: str | None = None


class _Call(BaseModel):
    index: int = 0
    id: str | None = None
    function: _Function = Field(default_factory=_Function)


class _Delta(BaseModel):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Top(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None = None


class _Logprob(_Top):
    top_logprobs: list[_Top] | None = None


class _Logprobs(BaseModel):
    content: list[_Logprob] | None = None


class _Details(BaseModel):
    image_tokens: int | None = None
    video_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(BaseModel):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None

    def counts(self) -> Usage:
        """0 for whatever is not told."""
        prompt = self.prompt_tokens_details or _Details()
        completion = self.completion_tokens_details or _Details()
        return Usage(
            prompt_tokens=self.prompt_tokens or 0,
            image_tokens=prompt.image_tokens or 0,
            video_tokens=prompt.video_tokens or 0,
            cached_tokens=_first(prompt.cached_tokens, self.cached_tokens, 0),
            completion_tokens=self.completion_tokens or 0,
            reasoning_tokens=_first(completion.reasoning_tokens, self.reasoning_tokens, 0),
        )


class _Choice(BaseModel):
    index: int = 0
    delta: _Delta = Field(default_factory=_Delta)
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    usage: _Usage | None = None


class _Chunk(BaseModel):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


@dataclass(slots=True)
class _OpenCall:
    """A tool call that is being written."""

    number: int
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Answer:
    """What has been seen of one answer."""

    calls: dict[int, _OpenCall] = field(default_factory=dict)
    reason: str | None = None


class AnswerReader:
    """Reads one stream.

    Args:
        num_answers: how many were asked for.
        planned: counts of the media that were sent; they are told instead of the endpoint's, to
            which clips may have gone as pictures. None: the endpoint's are told.
    """

    def __init__(self, num_answers: int, planned: Usage | None = None) -> None:
        self._answers = [_Answer() for _ in range(num_answers)]
        self._planned = planned
        self._usage = planned or Usage()

    def feed(self, data: str) -> Iterator[Batch]:
        """The events of one chunk.

        Raises:
            BackendAnswerError: it is no chunk, or the endpoint says that it failed.
        """
        try:
            chunk = _Chunk.model_validate_json(data)
        except ValidationError:
            raise BackendAnswerError("the backend sent what is no chunk of an answer") from None
        if chunk.error is not None:
            raise BackendAnswerError(f"the backend failed: {words_of(chunk.error)}")
        if chunk.usage is not None:
            self._count(chunk.usage)
        for choice in chunk.choices or ():
            if not 0 <= choice.index < len(self._answers):
                raise BackendAnswerError("the backend sent an answer that was not asked for")
            if choice.usage is not None:
                self._count(choice.usage)
            events = list(self._events(self._answers[choice.index], choice))
            if events:
                yield choice.index, events

    def finish(self) -> Iterator[Batch]:
        """The last events of all answers, with the counts on the first one's.

        Raises:
            BackendAnswerError: the stream ended before an answer did.
        """
        if any(answer.reason is None for answer in self._answers):
            raise BackendAnswerError("the backend broke off before the end of the answer")
        for index, answer in enumerate(self._answers):
            ends = [
                ToolCallEnd(
                    call.number,
                    ToolCall(name=call.name, arguments="".join(call.arguments) or "{}", id=call.id),
                )
                for call in answer.calls.values()
            ]
            usage = (
                self._usage
                if index == 0
                else replace(self._usage, completion_tokens=0, reasoning_tokens=0)
            )
            yield index, [*ends, Finish(_reason(answer), usage)]

    def _events(self, answer: _Answer, choice: _Choice) -> Iterator[Event]:
        delta = choice.delta
        reasoning = delta.reasoning_content or delta.reasoning
        if reasoning:
            yield Reasoning(reasoning)
        logprobs = _logprobs(choice.logprobs)
        if delta.content or (logprobs and not reasoning):
            yield Content(delta.content or "", logprobs=logprobs)
        for call in delta.tool_calls or ():
            yield from _call_events(answer, call)
        answer.reason = choice.finish_reason or answer.reason

    def _count(self, usage: _Usage) -> None:
        counts, planned = usage.counts(), self._planned
        if planned is not None:
            counts = replace(
                counts, image_tokens=planned.image_tokens, video_tokens=planned.video_tokens
            )
        self._usage = counts


def read_usage(usage: object) -> Usage:
    """The counts of an answer that came as a whole; none where they cannot be read."""
    try:
        return _Usage.model_validate(usage or {}).counts()
    except ValidationError:
        return Usage()


def _call_events(answer: _Answer, piece: _Call) -> Iterator[Event]:
    call = answer.calls.get(piece.index)
    if call is None:
        if not piece.function.name:
            raise BackendAnswerError("the backend sent a tool call without a name")
        call_id = piece.id or f"call_{uuid4().hex[:24]}"
        call = _OpenCall(len(answer.calls), call_id, piece.function.name)
        answer.calls[piece.index] = call
        yield ToolCallBegin(call.number, call.id, call.name)
    if piece.function.arguments:
        call.arguments.append(piece.function.arguments)
        yield ToolCallArguments(call.number, piece.function.arguments)


def _reason(answer: _Answer) -> FinishReason:
    if answer.reason == "length":
        return "length"
    return "tool_calls" if answer.calls else "stop"


def _logprobs(logprobs: _Logprobs | None) -> tuple[TextLogprob, ...]:
    items = logprobs.content or () if logprobs is not None else ()
    return tuple(
        TextLogprob(
            _bytes(item),
            item.logprob,
            tuple((_bytes(top), top.logprob) for top in item.top_logprobs or ()),
        )
        for item in items
    )


def _bytes(item: _Top) -> bytes:
    try:
        return item.token.encode() if item.bytes is None else bytes(item.bytes)
    except ValueError:
        raise BackendAnswerError("the backend sent a token that is none") from None


def _first(*values: int | None) -> int:
    """The first that is there."""
    return next(value for value in values if value is not None)


def words_of(error: Any) -> str:
    """An endpoint's own words about an error, on one line of bounded length."""
    if isinstance(error, dict):
        error = error.get("message", error.get("detail", ""))
    text = error if isinstance(error, str) else json.dumps(error)
    return " ".join(text.split())[:MAX_WORDS] or "without a word"
