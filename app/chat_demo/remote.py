"""A chat over HTTP: any OpenAI-compatible endpoint behind the seam of ``model.py``.

It is asked and read as by our server in front of one (``k3vl.app.upstream``). Leaving the iterator
closes the connection, which is how a client stops an endpoint.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3vl.app.sent_media import image_url, video_url
from k3vl.app.upstream.answers import AnswerReader
from k3vl.app.upstream.client import check_model
from k3vl.app.upstream.endpoint import Endpoint
from k3vl.app.upstream.messages import write_body
from k3vl.errors import BackendError, CapacityError, MediaError, RequestError
from k3vl.types import ChatOptions, MediaPart, TextPart, ToolCallEnd
from k3vl.vision.source import read_path

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from k3vl.app.upstream.client import Refusal
    from k3vl.errors import K3VLError
    from k3vl.types import Event, Message, Part, SamplingParams
    from k3vl.vision.processor import MediaProcessor

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
        self._where = (base_url, api_key)
        self._seconds = seconds

    def check(self) -> None:
        """Ask the endpoint for its models.

        Raises:
            ConfigError: it does not answer, refuses the key, or has no such model.
        """
        check_model(*self._where, self.name)

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
        base_url, api_key = self._where
        # A client of its own for every answer: its connection ends with it, however it ends.
        endpoint = Endpoint(
            base_url, api_key=api_key, read_seconds=self._seconds, refused=for_the_owner
        )
        reader = AnswerReader(num_answers=1)
        try:
            async with endpoint.stream(body) as chunks:
                async for data in chunks:
                    for _, events in reader.feed(data):
                        for event in events:
                            yield event
        finally:
            await endpoint.close()
        for _, events in reader.finish():
            for event in events:
                yield _parsed(event)

    def _body(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        options: ChatOptions,
        sampling: SamplingParams,
    ) -> bytes:
        fields: dict[str, Any] = {
            "model": self.name,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
        }
        if sampling.top_p < 1:
            fields["top_p"] = sampling.top_p
        if sampling.seed is not None:
            fields["seed"] = sampling.seed
        if tools:
            fields["tools"] = list(tools)
        # Hosted K3 always thinks and knows no switch, so it is only sent where it is off.
        if not options.thinking:
            fields["chat_template_kwargs"] = {"thinking": False}
        elif options.thinking_effort:
            fields["reasoning_effort"] = options.thinking_effort
        return write_body(fields, [_sent(m, f"messages[{i}]") for i, m in enumerate(messages)])


def _sent(message: Message, where: str) -> Message:
    """A message with URLs in the place of files.

    Raises:
        MediaError: a file cannot be read or is too large to be sent; ``param`` begins with
            ``where``.
    """
    parts = []
    for index, part in enumerate(message.parts):
        try:
            parts.append(_sent_part(part))
        except MediaError as exc:
            raise MediaError(str(exc), param=f"{where}.content[{index}]", code=exc.code) from exc
    return replace(message, parts=tuple(parts))


def _sent_part(part: Part) -> Part:
    if isinstance(part, TextPart):
        return part
    assert isinstance(part.source, Path), "attachments are files"
    url = video_url(part.source) if part.kind == "video" else image_url(read_path(part.source))
    return MediaPart(part.kind, url)


def _parsed(event: Event) -> Event:
    """Arguments that are a JSON object, as one; a call is shown and answered by its fields."""
    if not isinstance(event, ToolCallEnd) or not isinstance(event.call.arguments, str):
        return event
    try:
        value = json.loads(event.call.arguments)
    except ValueError:
        return event
    if not isinstance(value, dict):
        return event
    return replace(event, call=replace(event.call, arguments=value))


def for_the_owner(refusal: Refusal) -> K3VLError:
    """A refusal for who chose the endpoint; a file that it names is a ``MediaError``."""
    status, said = refusal.status, refusal.said
    if status == 400 and refusal.param and _FILE_PARAM.fullmatch(refusal.param):
        return MediaError(said, param=refusal.param, code=str(refusal.code))
    if status in (429, 503):
        return CapacityError(f"the endpoint is busy: HTTP {status}: {said}")
    if status >= 500:
        return BackendError(f"the endpoint failed: HTTP {status}: {said}")
    return RequestError(f"the endpoint refused it: HTTP {status}: {said}", code=f"http_{status}")
