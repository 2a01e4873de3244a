"""A chat over HTTP: any OpenAI-compatible endpoint behind the seam of ``model.py``.

Chunks become the events that the embedded engine gives: reasoning, content, tool calls, and counts
at the end. Leaving the iterator closes the connection, which is how a client stops an endpoint.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3vl.app.endpoint import check_endpoint, error_text, need_http_client, open_client, read_usage
from k3vl.app.replies import call_json
from k3vl.app.sent_media import image_url, video_url
from k3vl.errors import BackendError, CapacityError, MediaError, RequestError
from k3vl.types import (
    ChatOptions,
    Content,
    Finish,
    MediaPart,
    Reasoning,
    TextPart,
    ToolCall,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    Usage,
)
from k3vl.vision.source import read_path

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from k3vl.errors import K3VLError
    from k3vl.types import Event, FinishReason, Message, SamplingParams
    from k3vl.vision.processor import MediaProcessor

_REASONS: dict[str, FinishReason] = {
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
}
_FILE_PARAM = re.compile(r"messages\[\d+\]\.content\[\d+\]")


class RemoteChat:
    """A :class:`~k3vl.app.chat_demo.model.ChatModel` at an endpoint.

    Args:
        base_url: up to and including ``/v1``.
        model: the name that the endpoint knows.
        processor: K3's media settings.
        api_key: sent as a bearer token; None sends none.
        seconds: longest wait for the next bytes.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        processor: MediaProcessor,
        *,
        api_key: str | None = None,
        seconds: float = 600.0,
    ) -> None:
        self.name = model
        self.defaults = ChatOptions()
        self.processor = processor
        self.min_confidence: float | None = None
        self._http = need_http_client()
        self._where = (base_url, api_key)
        self._seconds = seconds

    def check(self) -> None:
        """Ask the endpoint for its models.

        Raises:
            ConfigError: it does not answer, refuses the key, or has no such model.
        """
        with self._open(self._http.Client) as client:
            check_endpoint(client, self.name)

    def holds_features(self, digest: str) -> bool | None:
        """No endpoint tells."""
        del digest
        return None

    async def stream(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]],
        options: ChatOptions,
        sampling: SamplingParams,
    ) -> AsyncIterator[Event]:
        """See :class:`~k3vl.app.chat_demo.model.ChatModel`."""
        body = await asyncio.to_thread(self._body, messages, tools, options, sampling)
        reader = ChunkReader()
        try:
            # A client of its own for every answer: its connection ends with it, however it ends.
            async with (
                self._open(self._http.AsyncClient) as client,
                client.stream("POST", "chat/completions", json=body) as response,
            ):
                if response.status_code != 200:
                    await response.aread()
                    raise refusal(response)
                async for line in response.aiter_lines():
                    if (chunk := _chunk(line)) is not None:
                        for event in reader.feed(chunk):
                            yield event
        except self._http.HTTPError as exc:
            raise BackendError(f"the connection failed ({type(exc).__name__})") from exc
        for event in reader.finish():
            yield event

    def _open(self, kind: Any) -> Any:
        base_url, api_key = self._where
        return open_client(kind, base_url, api_key, seconds=self._seconds)

    def _body(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        options: ChatOptions,
        sampling: SamplingParams,
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.name,
            "messages": [message_json(m, f"messages[{i}]") for i, m in enumerate(messages)],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
        }
        if sampling.top_p < 1:
            body["top_p"] = sampling.top_p
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if tools:
            body["tools"] = list(tools)
        # Hosted K3 always thinks and knows no switch, so it is only sent where it is off.
        if not options.thinking:
            body["chat_template_kwargs"] = {"thinking": False}
        elif options.thinking_effort:
            body["reasoning_effort"] = options.thinking_effort
        return body


# ---------------------------------------------------------------------- what is sent


def message_json(message: Message, where: str) -> dict[str, Any]:
    """A message as OpenAI's API takes it; the order of its parts is kept.

    Raises:
        MediaError: a file cannot be read or is too large to be sent; ``param`` begins with
            ``where``.
    """
    parts = []
    for index, part in enumerate(message.parts):
        try:
            parts.append(_part(part))
        except MediaError as exc:
            raise MediaError(str(exc), param=f"{where}.content[{index}]", code=exc.code) from exc
    text = "".join(part["text"] for part in parts if part["type"] == "text")
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.tool_call_id, "content": text}
    if message.role != "assistant":
        return {"role": message.role, "content": parts}
    result: dict[str, Any] = {"role": "assistant", "content": text}
    if message.reasoning:
        result["reasoning_content"] = message.reasoning
    if message.tool_calls:
        result["tool_calls"] = [call_json(call) for call in message.tool_calls]
    return result


def _part(part: MediaPart | TextPart) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    assert isinstance(part.source, Path), "attachments are files"
    url = video_url(part.source) if part.kind == "video" else image_url(read_path(part.source))
    return {"type": f"{part.kind}_url", f"{part.kind}_url": {"url": url}}


# ---------------------------------------------------------------------- what comes back


def refusal(response: Any) -> K3VLError:
    """The error behind a status that is not 200; a file that it names is a ``MediaError``."""
    status, text = response.status_code, error_text(response)
    try:
        error = response.json()["error"]
        param, code = error.get("param"), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        param = code = None
    if status == 400 and isinstance(param, str) and _FILE_PARAM.fullmatch(param):
        return MediaError(text, param=param, code=str(code))
    if status in (429, 503):
        return CapacityError(f"the endpoint is busy: HTTP {status}: {text}")
    if status >= 500:
        return BackendError(f"the endpoint failed: HTTP {status}: {text}")
    return RequestError(f"the endpoint refused it: HTTP {status}: {text}", code=f"http_{status}")


def _chunk(line: str) -> dict[str, Any] | None:
    """The chunk that a line of the stream holds; None for the end and for comments."""
    name, _, value = line.partition(":")
    if name != "data" or value.strip() == "[DONE]":
        return None
    try:
        chunk = json.loads(value)
    except ValueError as exc:
        raise BackendError("the endpoint sent a chunk that is not JSON") from exc
    if not isinstance(chunk, dict):
        raise BackendError("the endpoint sent a chunk that is no object")
    if chunk.get("error"):
        error = chunk["error"]
        text = error.get("message") if isinstance(error, dict) else error
        raise BackendError(f"the endpoint broke off: {str(text)[:300]}")
    return chunk


class ChunkReader:
    """Turns the chunks of one answer into events."""

    def __init__(self) -> None:
        """Nothing has come."""
        self._calls: list[tuple[str, str]] = []  # id and name
        self._arguments: list[str] = []
        self._reason: str | None = None
        self._usage: Usage | None = None

    def feed(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        """The events of a chunk."""
        if isinstance(chunk.get("usage"), dict):
            self._usage = read_usage(chunk["usage"])
        for choice in chunk.get("choices") or ():
            if choice.get("index", 0):
                continue
            delta = choice.get("delta") or {}
            if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
                yield Reasoning(str(reasoning))
            if content := delta.get("content"):
                yield Content(str(content))
            for call in delta.get("tool_calls") or ():
                yield from self._call(call)
            self._reason = choice.get("finish_reason") or self._reason

    def _call(self, call: Mapping[str, Any]) -> Iterator[Event]:
        index = call.get("index", 0)
        function = call.get("function") or {}
        if index == len(self._calls):
            if self._calls:
                yield self._end()
            self._calls.append((call.get("id") or f"call_{index}", function.get("name") or ""))
            self._arguments.append("")
            yield ToolCallBegin(index, *self._calls[index])
        if index != len(self._calls) - 1:
            raise BackendError("the endpoint mixed up the pieces of its tool calls")
        if text := function.get("arguments"):
            self._arguments[index] += text
            yield ToolCallArguments(index, text)

    def _end(self) -> ToolCallEnd:
        """The call that is being written is complete."""
        index = len(self._calls) - 1
        call_id, name = self._calls[index]
        text = self._arguments[index]
        try:
            value = json.loads(text or "{}")
        except ValueError:
            value = text
        arguments = value if isinstance(value, dict) else text
        return ToolCallEnd(index, ToolCall(name=name, arguments=arguments, id=call_id))

    def finish(self) -> Iterator[Event]:
        """The last events.

        Raises:
            BackendError: the stream ended without a reason.
        """
        if self._reason is None:
            raise BackendError("the endpoint ended its answer early")
        if self._calls:
            yield self._end()
        yield Finish(_REASONS.get(self._reason, "stop"), self._usage or Usage())
