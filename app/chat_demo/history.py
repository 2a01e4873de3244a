"""A conversation as typed values: what was asked with which files, and the answer in the making.

Nothing here knows Gradio or runs a model. Time comes in as seconds of one monotonic clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING

from k3vl.types import (
    Content,
    Finish,
    MediaPart,
    Message,
    Reasoning,
    TextPart,
    ToolCall,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from k3vl.types import Event, FinishReason, MediaKind, Part, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """A file of a turn.

    Attributes:
        path: where the upload lies.
        kind: how it is read.
        problem: why it cannot be used; empty while it can.
        shown: a picture in its place in the chat, where a browser cannot show the file itself.
        digests: content keys of its encoder items, once it was read.
    """

    path: Path
    kind: MediaKind
    problem: str = ""
    shown: Path | None = None
    digests: tuple[str, ...] = ()

    @property
    def part(self) -> MediaPart:
        """The file as a message has it."""
        return MediaPart(self.kind, self.path)


@dataclass(slots=True)
class CallDraft:
    """A tool call that is being written; ``call`` is set once it is complete."""

    name: str
    arguments: str = ""
    call: ToolCall | None = None


@dataclass(slots=True)
class Answer:
    """What has come of an answer so far, and when.

    Attributes:
        started: when it was asked for.
        reasoning, content: the two channels' text.
        calls: tool calls in order.
        first_at: when the first text or call came.
        thinking_at, thought_at: first reasoning, and the first thing after it.
        ended_at: when nothing more can come.
        pieces: events that carried something; about one per token.
        finish, usage: as the last event had them.
        stopped: the visitor ended it.
        error: why it failed, in words.
        logprobs: of the content's tokens, where they were asked for.
        unsure_below: a confidence that the checkpoint would rather not be trusted below.
    """

    started: float
    reasoning: str = ""
    content: str = ""
    calls: list[CallDraft] = field(default_factory=list)
    first_at: float | None = None
    thinking_at: float | None = None
    thought_at: float | None = None
    ended_at: float | None = None
    pieces: int = 0
    finish: FinishReason | None = None
    usage: Usage | None = None
    stopped: bool = False
    error: str = ""
    logprobs: list[float] = field(default_factory=list)
    unsure_below: float = 0.0

    @property
    def confidence(self) -> float | None:
        """Geometric mean of the probabilities of the content's tokens."""
        return math.exp(fmean(self.logprobs)) if self.logprobs else None

    def feed(self, event: Event, now: float) -> None:
        """Take the next event of the stream."""
        if isinstance(event, Finish):
            self.finish, self.usage = event.reason, event.usage
            self.end(now)
            return
        self.pieces += 1
        if self.first_at is None:
            self.first_at = now
        if isinstance(event, Reasoning):
            if self.thinking_at is None:
                self.thinking_at = now
            self.reasoning += event.text
            return
        if self.thinking_at is not None and self.thought_at is None:
            self.thought_at = now
        if isinstance(event, Content):
            if event.replaces_reasoning:
                self.reasoning, self.thinking_at, self.thought_at = "", None, None
            self.content += event.text
            self.logprobs += [token.logprob for token in event.logprobs]
        elif isinstance(event, ToolCallBegin):
            self.calls.append(CallDraft(event.name))
        elif isinstance(event, ToolCallArguments):
            self.calls[event.index].arguments += event.text
        elif isinstance(event, ToolCallEnd):
            self.calls[event.index].call = event.call

    def end(self, now: float, *, stopped: bool = False, error: str = "") -> None:
        """Nothing more will come; the first reason given stays."""
        if self.ended_at is None:
            self.ended_at, self.stopped, self.error = now, stopped, error
            if self.thinking_at is not None and self.thought_at is None:
                self.thought_at = now

    @property
    def complete_calls(self) -> tuple[ToolCall, ...]:
        """The calls that can be carried out."""
        return tuple(draft.call for draft in self.calls if draft.call is not None)

    def message(self, *, with_calls: bool) -> Message | None:
        """The answer as later turns see it; None where there is nothing to remember.

        Args:
            with_calls: its calls have results; a call without one is not told, for endpoints
                refuse it.
        """
        calls = self.complete_calls if with_calls else ()
        if not (self.content.strip() or calls):
            return None
        parts = (TextPart(self.content),) if self.content else ()
        return Message(
            role="assistant", parts=parts, reasoning=self.reasoning or None, tool_calls=calls
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What came of a call, in the visitor's words."""

    call: ToolCall
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A question with its files, or results of the calls before it; and the answer."""

    text: str = ""
    attachments: tuple[Attachment, ...] = ()
    results: tuple[ToolResult, ...] = ()
    answer: Answer

    @property
    def usable(self) -> tuple[Attachment, ...]:
        """The files that the model can be shown."""
        return tuple(file for file in self.attachments if not file.problem)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The question without what failed, or one message for each result."""
        if self.results:
            return tuple(
                Message(
                    role="tool",
                    parts=(TextPart(result.text),),
                    tool_call_id=result.call.id,
                    tool_name=result.call.name,
                )
                for result in self.results
            )
        parts: list[Part] = [file.part for file in self.usable]
        if self.text:
            parts.append(TextPart(self.text))
        return (Message(role="user", parts=tuple(parts)),) if parts else ()

    @property
    def askable(self) -> bool:
        """Whether the model may be asked: a question whose files all failed would be guessed at."""
        return bool(self.usable or self.results) or bool(self.text and not self.attachments)

    def without(self, file: Attachment, problem: str) -> Turn:
        """The same turn with one more file that cannot be used."""
        files = tuple(replace(f, problem=problem) if f is file else f for f in self.attachments)
        return replace(self, attachments=files)


@dataclass(frozen=True, slots=True)
class Remembered:
    """A conversation as the model gets it.

    Attributes:
        messages: in order; the last one is the question.
        owners: index into the turns of every message.
    """

    messages: tuple[Message, ...]
    owners: tuple[int, ...]


def remember(turns: Sequence[Turn]) -> Remembered:
    """Messages of the turns that were answered, and the question of the last.

    A turn that failed, or was stopped before any answer, is shown but not remembered: a bad file or
    an error never reaches a later question.
    """
    kept: list[tuple[int, tuple[Message, ...]]] = []
    with_calls = False  # whether the turn behind is remembered and holds results
    for index in reversed(range(len(turns))):
        turn, last = turns[index], index == len(turns) - 1
        reply = None if last else turn.answer.message(with_calls=with_calls)
        with_calls = False
        if last or (reply is not None and turn.messages):
            kept.append((index, turn.messages if reply is None else (*turn.messages, reply)))
            with_calls = bool(turn.results)
    kept.reverse()
    return Remembered(
        tuple(message for _, messages in kept for message in messages),
        tuple(index for index, messages in kept for _ in messages),
    )
