"""Generated tokens -> typed events: a state machine over control ids that never refuses a text.

``StreamParser`` takes pieces (from ``tokenizer.Detokenizer``) one at a time or many at once; any
split gives the same events once neighbours are joined. No official output parser exists for K3; the
rules (channels, repairs of what the model gets wrong, argument values) are this project's, and
every one has a test.

Three things a front end should know:

* Text sent as :class:`Reasoning` may turn out to be the answer (the model skipped its thinking). It
  is then sent again as one :class:`Content` with ``replaces_reasoning``.
* A call counts once its :class:`ToolCallEnd` has come. A call that was begun and never ended was
  cut off or malformed: drop it. Call indexes may therefore have gaps.
* :class:`ToolCallEnd` carries the call as it stands. The argument pieces concatenate to JSON that
  decodes to the same object (a repeated key is repeated there, and the last one counts), with one
  exception: a string argument that the model breaks off with the end of the call has been sent by
  then, and is missing from the final call.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal
from uuid import uuid4

from k3vl.types import (
    Content,
    Event,
    Finish,
    FinishReason,
    Reasoning,
    ToolCall,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from k3vl.xtml import tokens
from k3vl.xtml.values import (
    JSON_WHITESPACE,
    argument_json,
    argument_value,
    json_fragment,
    parse_header,
    strict_json,
    tag_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from k3vl.xtml.tokens import Piece


class _State(enum.Enum):
    """Where the text that comes next belongs."""

    THINK = "think"
    RESPONSE = "response"
    BETWEEN = "between"
    TOOLS = "tools"
    CALL = "call"
    VALUE = "value"


_CHANNELS: Final[Mapping[str, _State]] = {
    "think": _State.THINK,
    "response": _State.RESPONSE,
    "tools": _State.TOOLS,
}


def random_call_id() -> str:
    """An opaque id for a tool call."""
    return f"call_{uuid4().hex[:24]}"


class StreamParser:
    """Reads one generated message.

    Args:
        thinking: the prompt ended by opening the think channel; else it opened the response, as
            with thinking off, or for a message that is to be continued.
        tool_choice: the request's; with ``none`` calls are read and dropped.
        new_call_id: makes the id of the next call.
    """

    def __init__(
        self,
        *,
        thinking: bool = True,
        tool_choice: str | Mapping[str, Any] | None = None,
        new_call_id: Callable[[], str] = random_call_id,
    ) -> None:
        self._state = _State.THINK if thinking else _State.RESPONSE
        self._drop_calls = tool_choice == "none"
        self._new_call_id = new_call_id
        self._events: list[Event] = []
        self._header: list[str] | None = None
        self._header_closes = False
        # Text of the think channel that the prompt opened, while it may still be the answer.
        self._maybe_answer: list[str] | None = [] if thinking else None
        # Blanks between channels, dropped unless other text follows; None once it did.
        self._blanks: list[str] | None = None
        self._call: _Call | None = None
        self._num_begun = 0
        self._num_ended = 0
        self._ended = False
        self._finished = False

    @property
    def ended(self) -> bool:
        """The model ended its message; whatever else is fed is ignored."""
        return self._ended

    def feed(self, pieces: Iterable[Piece]) -> list[Event]:
        """Read more generated text; takes time linear in it."""
        for piece in pieces:
            if self._ended:
                break
            if piece.control:
                self._read_control(piece.text)
            elif piece.text:
                self._read_text(piece.text)
        events, self._events = self._events, []
        return events

    def flush(self, engine_finish: Literal["stop", "length"] = "stop") -> list[Event]:
        """End the message; the last event is the only :class:`Finish`.

        Args:
            engine_finish: ``length`` if the engine ran into a limit.
        """
        assert not self._finished, "a message is flushed once"
        self._ended = self._finished = True
        reason: FinishReason = "stop"
        if engine_finish == "length":
            reason = "length"
        elif self._num_ended:
            reason = "tool_calls"
        return [Finish(reason)]

    # ------------------------------------------------------------------ tokens

    def _read_control(self, marker: str) -> None:
        if self._header is not None:
            header, self._header = "".join(self._header), None
            self._read_tag(header, marker)
            if marker == tokens.SEP:
                return
            # Any other control token stands for the missing one and is read as itself too.
        if marker in tokens.END_MARKERS:
            self._ended = True
        elif self._state is _State.VALUE and marker != tokens.CLOSE:
            self._read_text(marker)
        elif marker in (tokens.OPEN, tokens.CLOSE):
            self._header, self._header_closes = [], marker == tokens.CLOSE

    def _read_text(self, text: str) -> None:
        if self._header is not None:
            self._header.append(text)
        elif self._state is _State.THINK:
            if self._maybe_answer is not None:
                self._maybe_answer.append(text)
            self._events.append(Reasoning(text))
        elif self._state is _State.RESPONSE:
            self._events.append(Content(text))
        elif self._state is _State.BETWEEN:
            self._read_between(text)
        elif self._state is _State.VALUE:
            assert self._call is not None
            self._events += self._call.value_text(text)

    def _read_between(self, text: str) -> None:
        if self._blanks is None:
            self._events.append(Content(text))
        elif text.isspace():
            self._blanks.append(text)
        else:
            self._events.append(Content("".join([*self._blanks, text])))
            self._blanks = None

    # ------------------------------------------------------------------ tags

    def _read_tag(self, header: str, ended_by: str) -> None:
        if self._state is _State.VALUE:
            self._close_in_value(header, ended_by)
        elif self._header_closes:
            self._close(tag_name(header))
        else:
            self._open(*parse_header(header))

    def _open(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag in _CHANNELS:
            if tag == "think":
                self._maybe_answer = None
            self._enter(_CHANNELS[tag])
        elif tag == "call" and self._state in (_State.TOOLS, _State.CALL):
            self._begin_call(attributes)
        elif tag in ("argument", "json") and self._state is _State.CALL:
            assert self._call is not None
            self._state = _State.VALUE
            self._events += self._call.begin_value(tag, attributes)

    def _close(self, tag: str) -> None:
        state = self._state
        if tag in ("response", "message") and self._maybe_answer is not None:
            answer = "".join(self._maybe_answer)
            if answer:
                self._events.append(Content(answer, replaces_reasoning=True))
            self._enter(_State.BETWEEN)
        elif tag == "call" and state is _State.CALL:
            self._end_call()
        elif (
            tag == "message"
            or _CHANNELS.get(tag) is state
            or (tag == "tools" and state is _State.CALL)
        ):
            self._enter(_State.BETWEEN)

    def _close_in_value(self, header: str, ended_by: str) -> None:
        """Only the value's own closer, or that of something around it, is structure in here."""
        assert self._call is not None
        tag = tag_name(header)
        if tag == self._call.value_tag:
            self._state = _State.CALL
            self._events += self._call.end_value()
        elif tag in ("call", "tools", "message"):
            self._state = _State.CALL
            self._events += self._call.abandon_value()
            self._close(tag)
        else:
            sep = ended_by if ended_by == tokens.SEP else ""
            self._events += self._call.value_text(f"{tokens.CLOSE}{header}{sep}")

    def _enter(self, state: _State) -> None:
        """Go to a channel or between channels; an open call is dropped."""
        if state is not _State.THINK:
            self._maybe_answer = None
        self._blanks = [] if state is _State.BETWEEN else None
        self._call = None
        self._state = state

    # ------------------------------------------------------------------ calls

    def _begin_call(self, attributes: Mapping[str, str]) -> None:
        self._state = _State.CALL
        name = attributes.get("tool")
        if self._drop_calls or not name:
            self._call = _Call(index=None, name="", call_id="")
            return
        self._call = _Call(index=self._num_begun, name=name, call_id=self._new_call_id())
        self._events.append(ToolCallBegin(self._num_begun, self._call.id, name))
        self._num_begun += 1

    def _end_call(self) -> None:
        assert self._call is not None
        if self._call.index is not None:
            self._events += self._call.end()
            self._num_ended += 1
        self._call = None
        self._state = _State.TOOLS


class _Call:
    """The call that is being read; ``index`` None: read, but reported to nobody."""

    def __init__(self, *, index: int | None, name: str, call_id: str) -> None:
        self.index = index
        self.name = name
        self.id = call_id
        self.value_tag = ""
        self._arguments: dict[str, Any] = {}
        self._raw: str | None = None  # a json element that held no object
        self._is_open = False  # the brace of the arguments object has been sent
        self._key: str | None = None
        self._kind = "string"
        self._chunks: list[str] = []
        self._streams = False

    def begin_value(self, tag: str, attributes: Mapping[str, str]) -> list[Event]:
        """An ``argument`` or ``json`` element was opened."""
        self.value_tag = tag
        self._key = attributes.get("key")
        self._kind = attributes.get("type", "string")
        self._chunks = []
        self._streams = tag == "argument" and self._key is not None and self._kind == "string"
        return self._send_member('"') if self._streams else []

    def value_text(self, text: str) -> list[Event]:
        """More text of the element."""
        self._chunks.append(text)
        return self._send(json_fragment(text)) if self._streams else []

    def end_value(self) -> list[Event]:
        """The element was closed properly."""
        text = "".join(self._chunks)
        if self.value_tag == "json":
            return self._end_json(text)
        if self._key is None:
            return []
        self._arguments[self._key] = argument_value(self._kind, text)
        if self._streams:
            return self._send('"')
        return self._send_member(argument_json(self._kind, text))

    def abandon_value(self) -> list[Event]:
        """The element was broken off: it does not count; what was sent must stay JSON."""
        return self._send('"') if self._streams else []

    def end(self) -> list[Event]:
        """The call was closed properly."""
        assert self.index is not None
        events: list[Event] = []
        if self._is_open:
            events.append(ToolCallArguments(self.index, "}"))
        elif self._raw is None:
            events.append(ToolCallArguments(self.index, "{}"))
        arguments = self._arguments if self._raw is None else self._raw
        call = ToolCall(name=self.name, arguments=arguments, id=self.id)
        return [*events, ToolCallEnd(self.index, call)]

    def _end_json(self, text: str) -> list[Event]:
        try:
            members = strict_json(text)
        except ValueError:
            members = None
        if not isinstance(members, dict):
            events = [] if self._is_open else self._send(text)
            if self._raw is None:
                self._raw = text
            return events
        self._arguments.update(members)
        inside = text.strip(JSON_WHITESPACE)[1:-1].strip(JSON_WHITESPACE)
        return self._send(self._separator() + inside) if members else []

    def _send_member(self, value: str) -> list[Event]:
        return self._send(
            f"{self._separator()}{json.dumps(self._key, ensure_ascii=False)}: {value}"
        )

    def _separator(self) -> str:
        """What goes in front of a member; sending it opens the object."""
        if self._raw is not None or self._is_open:
            return ", "
        self._is_open = True
        return "{"

    def _send(self, text: str) -> list[Event]:
        """Arguments text, unless nobody listens or raw text has taken the object's place."""
        if self.index is None or self._raw is not None or not text:
            return []
        return [ToolCallArguments(self.index, text)]


# ---------------------------------------------------------------------- the whole answer


@dataclass(frozen=True, slots=True)
class Answer:
    """A message put together from its events; ``finish`` is None if it was cancelled."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    finish: FinishReason | None


def collect(events: Iterable[Event]) -> Answer:
    """Put the events of one message together."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    finish: FinishReason | None = None
    for event in events:
        match event:
            case Reasoning(text):
                reasoning.append(text)
            case Content(text, replaces_reasoning):
                if replaces_reasoning:
                    reasoning.clear()
                content.append(text)
            case ToolCallEnd(call=call):
                calls.append(call)
            case Finish(reason):
                finish = reason
            case _:
                pass
    return Answer("".join(reasoning), "".join(content), tuple(calls), finish)
