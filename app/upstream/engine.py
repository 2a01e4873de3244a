"""An endpoint as an :class:`k3vl.app.engines.Engine`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from k3vl.app.upstream.answers import AnswerReader
from k3vl.app.upstream.messages import with_urls, write_body
from k3vl.errors import RequestError
from k3vl.prompt import count_tokens
from k3vl.types import Usage
from k3vl.vision.processor import MediaProcessor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from k3vl.app.engines import Batches, PreparedChat
    from k3vl.app.openai import ChatCall
    from k3vl.app.upstream.endpoint import Endpoint
    from k3vl.lm.stats import EngineStats
    from k3vl.prompt import PromptWriter
    from k3vl.types import ChatOptions, ProcessedMedia, Prompt
    from k3vl.vision.worker import MediaForm

VideoForm: TypeAlias = Literal["frames", "native"]
PASSED_ON: Final = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "reasoning_effort",
    "thinking",
    "chat_template_kwargs",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "n",
    "logprobs",
    "top_logprobs",
    "cache_salt",
    "user",
)
"""Fields that an endpoint gets as the client sent them; what is not sent is the endpoint's choice,
but for the length of the answer."""


class UpstreamEngine:
    """Answers from elsewhere, media from here.

    Args:
        endpoint: where.
        model: the name that the endpoint knows.
        processor: the media rules of that model.
        defaults: chat options of requests that bring none; for counting alone.
        video: clips go as groups of frames, each a picture behind clock texts, or as they came.
        context_length: if known.
        writer: counts tokens here; None: there is no tokenizer.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        model: str,
        processor: MediaProcessor,
        defaults: ChatOptions,
        video: VideoForm = "frames",
        context_length: int | None = None,
        writer: PromptWriter | None = None,
    ) -> None:
        self._endpoint, self._model, self._writer = endpoint, model, writer
        self._frames_per_group: int | None = None
        if video == "frames":
            self._frames_per_group = processor.config.temporal_merge_kernel_size
            # Every frame is a picture of its own there, and is budgeted and counted as one.
            config = replace(processor.config, temporal_merge_kernel_size=1)
            processor = MediaProcessor(config, limits=processor.limits, policy=processor.policy)
        self.processor, self.defaults, self.context_length = processor, defaults, context_length
        self.media_form: MediaForm = "frames" if video == "frames" else "clips"
        self.most_characters = (
            None
            if writer is None or context_length is None
            else writer.most_characters(context_length)
        )

    def prepare(self, call: ChatCall, media: Sequence[ProcessedMedia]) -> PreparedChat:
        """See :class:`~k3vl.app.engines.Engine`."""
        request, _ = with_urls(call.request, media, self._frames_per_group)
        passed = {
            name: call.fields[name] for name in PASSED_ON if call.fields.get(name) is not None
        }
        fields: dict[str, Any] = {
            **passed,
            "model": self._model,
            "max_completion_tokens": call.request.sampling.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body = write_body(fields, request.messages)
        return _UpstreamChat(self._endpoint, body, call.num_choices, _planned(media))

    def count(self, call: ChatCall, media: Sequence[ProcessedMedia]) -> tuple[Prompt, Usage]:
        """See :class:`~k3vl.app.engines.Engine`."""
        if self._writer is None:
            raise RequestError(
                "this server has no tokenizer of its model (k3vl serve --backend ... --model DIR)",
                code="no_tokenizer",
            )
        request, sent = with_urls(call.request, media, self._frames_per_group)
        prompt, usage = self._writer.write(request, sent)
        planned = _planned(media)
        return prompt, replace(planned, prompt_tokens=usage.prompt_tokens)

    async def probe(self) -> bool:
        """See :class:`~k3vl.app.engines.Engine`: the endpoint lists its models."""
        return await self._endpoint.is_alive()

    def stats(self) -> EngineStats | None:
        """See :class:`~k3vl.app.engines.Engine`: they are the endpoint's own."""
        return None

    async def close(self) -> None:
        """See :class:`~k3vl.app.engines.Engine`."""
        await self._endpoint.close()


def _planned(media: Sequence[ProcessedMedia]) -> Usage:
    return Usage(
        image_tokens=count_tokens(media, "image"), video_tokens=count_tokens(media, "video")
    )


@dataclass(frozen=True, slots=True)
class _UpstreamChat:
    endpoint: Endpoint
    body: bytes
    num_choices: int
    planned: Usage

    @contextlib.asynccontextmanager
    async def answers(self) -> AsyncIterator[Batches]:
        """See :class:`~k3vl.app.engines.PreparedChat`."""
        async with self.endpoint.stream(self.body) as events:
            batches = self._read(events)
            async with contextlib.aclosing(batches):
                yield batches

    async def _read(self, events: AsyncIterator[str]) -> Batches:
        reader = AnswerReader(self.num_choices, self.planned)
        async for data in events:
            for batch in reader.feed(data):
                yield batch
        for batch in reader.finish():
            yield batch
