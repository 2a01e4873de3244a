"""What the model answers -> SGLang's replies, read by our parser instead of SGLang's own two.

It reads token ids, so a marker that the model spells out stays text, and arguments of tool calls go
out as they are made; SGLang's detector holds each call back until it is whole. SGLang 0.5.23 has an
interface for that (``ChatEncodingOutputAdapter``), for chats and for ``/v1/responses``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from sglang.srt.entrypoints.openai.chat_encoding_adapters import (
    select_new_output_ids,
    token_output_sse_chunks,
)
from sglang.srt.entrypoints.openai.protocol import FunctionResponse, ToolCall
from sglang.srt.function_call.core_types import ToolCallItem
from sglang.srt.runtime_context import get_serving

from k3vl.generation import Generation
from k3vl.lm.backend import Token
from k3vl.sglang.chat import chat_options
from k3vl.types import (
    ChatOptions,
    Content,
    Message,
    Reasoning,
    Request,
    SamplingParams,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from k3vl.types import Event
    from k3vl.xtml.tokenizer import Tokenizer


@dataclass(slots=True)
class Delta:
    """What some tokens have added to an answer.

    Attributes:
        reasoning, content: text.
        pieces: of tool calls: number, name on the first piece of each, arguments.
        ended: numbers of the calls that are whole now; others may be dropped yet.
    """

    reasoning: str = ""
    content: str = ""
    pieces: list[tuple[int, str | None, str]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)


class AnswerReader:
    """Reads one answer.

    Args:
        tokenizer: the checkpoint's.
        options: of the request.
        stops: stop strings, which are no part of the content.
        is_continued: the prompt ended inside the answer.
        separate: reasoning apart from content.
        hold: reasoning goes out in one piece.
        parse_calls: tool calls are wanted.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: ChatOptions,
        *,
        stops: tuple[str, ...] = (),
        is_continued: bool = False,
        separate: bool = True,
        hold: bool = False,
        parse_calls: bool = True,
    ) -> None:
        last = (Message(role="assistant", partial=True),) if is_continued else ()
        request = Request(messages=last, options=options, sampling=SamplingParams(stop=stops))
        self._generation = Generation(tokenizer, request, Usage())
        self._separate, self._hold, self._parse_calls = separate, hold, parse_calls
        self._held = ""
        self.num_read = 0

    def read(self, token_ids: Sequence[int], finish: Mapping[str, Any] | None) -> Delta:
        """Take the next tokens.

        Args:
            token_ids: that were not read before.
            finish: SGLang's reason with the last of them; None: there will be more.
        """
        self.num_read += len(token_ids)
        events = [event for token_id in token_ids for event in self._feed(Token(id=token_id))]
        if finish is not None:
            reason: Literal["stop", "length"] = "length" if finish["type"] == "length" else "stop"
            events += self._feed(Token(id=None, finish=reason))
        return self._delta(events, is_last=finish is not None)

    def _feed(self, token: Token) -> list[Event]:
        return [] if self._generation.done else self._generation.feed(token)

    def _delta(self, events: Iterable[Event], *, is_last: bool) -> Delta:
        delta = Delta()
        for event in events:
            match event:
                case Reasoning(text) if self._separate:
                    self._held += text
                case Reasoning(text):
                    delta.content += text
                case Content(text, replaces) if self._separate or not replaces:
                    self._release(delta)
                    if replaces:
                        delta.reasoning = ""
                    delta.content += text
                case ToolCallBegin(number, _, name) if self._parse_calls:
                    delta.pieces.append((number, name, ""))
                case ToolCallArguments(number, text) if self._parse_calls:
                    delta.pieces.append((number, None, text))
                case ToolCallEnd(number) if self._parse_calls:
                    delta.ended.append(number)
                case _:
                    pass
        if is_last or delta.pieces or not self._hold:
            self._release(delta)
        return delta

    def _release(self, delta: Delta) -> None:
        delta.reasoning += self._held
        self._held = ""


class K3AnswerAdapter:
    """SGLang's ``ChatEncodingOutputAdapter`` over our parser."""

    def __init__(self, tokenizer: Tokenizer, defaults: ChatOptions, hooks: Any) -> None:
        """Keep what every answer shares.

        Args:
            tokenizer: the checkpoint's vocabulary.
            defaults: the checkpoint's chat defaults.
            hooks: SGLang's ``ChatOutputHooks``: its handler's ids of tool calls.
        """
        self._tokenizer, self._defaults, self._hooks = tokenizer, defaults, hooks

    # ------------------------------------------------------------------ chats

    def parse_chat_response(
        self, *, request: Any, output_ids: list[int], finish_reason: dict[str, Any]
    ) -> tuple[str | None, str, list[Any] | None, dict[str, Any]]:
        """A whole answer: reasoning, content, calls, and why it ended."""
        delta = self._of_chat(request, hold=False).read(output_ids, finish_reason)
        calls = [
            self._call(request, number, name, arguments)
            for number, name, arguments in _whole(delta)
        ]
        if not calls:
            return delta.reasoning or None, delta.content, None, finish_reason
        if finish_reason["type"] == "stop":
            finish_reason = {**finish_reason, "type": "tool_calls", "matched": None}
        return delta.reasoning or None, delta.content, calls, finish_reason

    def stream_chat_chunks(
        self,
        *,
        content: dict[str, Any],
        index: int,
        request: Any,
        created: int,
        parser_dict: dict[int, Any],
        has_tool_calls: dict[int, bool],
        choice_logprobs: dict[str, Any] | None,
        finish_reason_type: str | None,
        usage: dict[str, Any] | None,
    ) -> list[str]:
        """The framed chunks of what is new in one answer of a stream."""
        if index not in parser_dict:
            parser_dict[index] = self._of_chat(request, hold=not request.stream_reasoning)
        finish = content["meta_info"]["finish_reason"] if finish_reason_type else None
        delta = _next(parser_dict[index], content, finish)
        if delta.ended:
            has_tool_calls[index] = True
        chunks: list[str] = token_output_sse_chunks(
            chunk_id=content["meta_info"]["id"],
            created=created,
            model=request.model,
            index=index,
            usage=usage,
            logprobs=choice_logprobs,
            reasoning=delta.reasoning,
            content=delta.content,
            tool_calls=[self._call(request, *piece) for piece in delta.pieces],
        )
        return chunks

    def _of_chat(self, request: Any, *, hold: bool) -> AnswerReader:
        stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
        return AnswerReader(
            self._tokenizer,
            chat_options(request, self._defaults),
            stops=() if request.no_stop_trim else stops,
            is_continued=request.continue_final_message,
            separate=request.separate_reasoning,
            hold=hold,
        )

    def _call(self, request: Any, number: int, name: str | None, arguments: str) -> Any:
        """A call, or a piece of one: without a name it only adds to the arguments."""
        call_id = None
        if name is not None:
            item = ToolCallItem(tool_index=number, name=name, parameters="")
            before = self._hooks.history_tool_calls_count(request)
            call_id = self._hooks.tool_call_id(item, before)
        function = FunctionResponse(name=name, arguments=arguments)
        return ToolCall(id=call_id, index=number, function=function)

    # ------------------------------------------------------------------ /v1/responses

    def parse_responses_output(
        self,
        *,
        request: Any,
        require_reasoning: bool,
        output_ids: list[int],
        finish_reason: dict[str, Any] | None,
        separate_reasoning: bool,
        parse_tool_calls: bool,
    ) -> tuple[str, str, list[Any]]:
        """A whole answer: reasoning, content, calls."""
        reader = self._of_response(require_reasoning, separate_reasoning, parse_tool_calls)
        delta = reader.read(output_ids, finish_reason or {"type": "stop"})
        return delta.reasoning, delta.content, _items(_whole(delta))

    def new_responses_stream(
        self,
        *,
        request: Any,
        require_reasoning: bool,
        separate_reasoning: bool,
        parse_tool_calls: bool,
    ) -> ResponsesStream:
        """The same, as it comes."""
        return ResponsesStream(
            self._of_response(require_reasoning, separate_reasoning, parse_tool_calls)
        )

    def _of_response(self, thinking: bool, separate: bool, parse_calls: bool) -> AnswerReader:
        effort = self._defaults.thinking_effort if thinking else None
        options = ChatOptions(thinking=thinking, thinking_effort=effort)
        return AnswerReader(self._tokenizer, options, separate=separate, parse_calls=parse_calls)


class ResponsesStream:
    """SGLang's ``ResponsesOutputStream``."""

    def __init__(self, reader: AnswerReader) -> None:
        """Nothing has come."""
        self._reader = reader

    def step(
        self, chunk: dict[str, Any], finish_reason: dict[str, Any] | None
    ) -> tuple[str, str, list[Any]]:
        """What a chunk adds: reasoning, content, pieces of calls."""
        delta = _next(self._reader, chunk, finish_reason)
        return delta.reasoning, delta.content, _items(delta.pieces)


def _next(
    reader: AnswerReader, chunk: Mapping[str, Any], finish: Mapping[str, Any] | None
) -> Delta:
    """Read what a chunk of SGLang's has beyond those before it."""
    new = select_new_output_ids(
        output_ids=chunk.get("output_ids") or [],
        num_consumed_tokens=reader.num_read,
        completion_tokens=chunk["meta_info"]["completion_tokens"],
        finish_reason_type=finish["type"] if finish else None,
        incremental=get_serving().incremental_streaming_output,
    )
    return reader.read(new, finish)


def _whole(delta: Delta) -> list[tuple[int, str | None, str]]:
    """The calls that were ended, each in one piece."""
    names = {number: name for number, name, _ in delta.pieces if name is not None}
    return [
        (number, names[number], "".join(text for n, _, text in delta.pieces if n == number))
        for number in delta.ended
    ]


def _items(pieces: Iterable[tuple[int, str | None, str]]) -> list[Any]:
    return [
        ToolCallItem(tool_index=number, name=name, parameters=text) for number, name, text in pieces
    ]
