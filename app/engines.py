"""The seam between the server and what answers: the embedded pipeline, or an endpoint elsewhere.

An :class:`Engine` is chosen at start. It takes requests that were read and checked, with media that
were processed here, and gives events; the server around it (routes, limits, media, queues, errors)
does not know which one it has. The second implementation is in ``upstream``.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from k3vl.errors import K3VLError
from k3vl.types import Prompt, SamplingParams
from k3vl.xtml.tokens import END_OF_MSG

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from k3vl.app.openai import ChatCall
    from k3vl.generation import Answer
    from k3vl.lm.backend import Token
    from k3vl.lm.stats import EngineStats
    from k3vl.pipeline import Pipeline, Prepared
    from k3vl.types import ChatOptions, Event, ProcessedMedia, Usage
    from k3vl.vision.processor import MediaProcessor
    from k3vl.vision.worker import MediaForm

    Batches = AsyncGenerator[tuple[int, list[Event]]]
    """Events of several answers as they come, each list with the answer's number."""

PROBE_SECONDS = 10.0


class PreparedChat(Protocol):
    """A request that only the model has not seen yet."""

    def answers(self) -> AbstractAsyncContextManager[Batches]:
        """All answers that were asked for; entered once the engine has taken the request.

        Raises:
            K3VLError: on entering or while iterating, whatever went wrong; the first ends all.
        """


class Engine(Protocol):
    """What answers requests.

    Attributes:
        processor: whose rules the server's media workers follow.
        media_form: what the workers are to make.
        defaults: chat options of requests that bring none.
        context_length: tokens of prompt and answer together; None: not known.
        most_characters: longer text never fits; None: not known.
    """

    processor: MediaProcessor
    media_form: MediaForm
    defaults: ChatOptions
    context_length: int | None
    most_characters: int | None

    def prepare(self, call: ChatCall, media: Sequence[ProcessedMedia]) -> PreparedChat:
        """Write the prompt; blocks.

        Args:
            call: what is asked.
            media: one for each of ``xtml.render.media_parts(call.request.messages)``.

        Raises:
            RequestError: the conversation or the asked form cannot be expressed.
        """

    def count(self, call: ChatCall, media: Sequence[ProcessedMedia]) -> tuple[Prompt, Usage]:
        """The prompt that :meth:`prepare` would have answered, and its counts; blocks.

        Raises:
            RequestError: as :meth:`prepare`, or there is no tokenizer here.
        """

    async def probe(self) -> bool:
        """Whether it would answer now."""

    def stats(self) -> EngineStats | None:
        """Caches, memory and times, if it reports any."""

    async def close(self) -> None:
        """The server ends."""


# ---------------------------------------------------------------------- the embedded one


class EmbeddedEngine:
    """A pipeline as an :class:`Engine`; the pipeline itself stays its owner's to close."""

    media_form: MediaForm = "patches"

    def __init__(self, pipeline: Pipeline) -> None:
        """Wrap a pipeline."""
        self.pipeline = pipeline
        self.processor, self.defaults = pipeline.processor, pipeline.defaults
        self.context_length = pipeline.context_length
        self.most_characters = (
            None
            if pipeline.context_length is None
            else pipeline.writer.most_characters(pipeline.context_length)
        )

    def prepare(self, call: ChatCall, media: Sequence[ProcessedMedia]) -> PreparedChat:
        """See :class:`Engine`."""
        prepared = self.pipeline.assemble(call.request, media)
        return _EmbeddedChat(self.pipeline, prepared, call.num_choices)

    def count(self, call: ChatCall, media: Sequence[ProcessedMedia]) -> tuple[Prompt, Usage]:
        """See :class:`Engine`."""
        prepared = self.pipeline.assemble(call.request, media)
        return prepared.prompt, prepared.usage

    async def probe(self) -> bool:
        """See :class:`Engine`: one token is made."""
        loop = asyncio.get_running_loop()
        beat: asyncio.Future[bool] = loop.create_future()

        def settle(is_alive: bool) -> None:
            if not beat.done():
                beat.set_result(is_alive)

        def sink(item: Token | K3VLError) -> None:
            loop.call_soon_threadsafe(settle, not isinstance(item, K3VLError))

        backend = self.pipeline.backend
        prompt = Prompt((self.pipeline.tokenizer.special_ids[END_OF_MSG],))
        try:
            request_id = backend.submit(prompt, SamplingParams(max_tokens=1), sink)
        except K3VLError:
            return False
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                return await beat
        except TimeoutError:
            return False
        finally:
            backend.cancel(request_id)

    def stats(self) -> EngineStats | None:
        """See :class:`Engine`."""
        return self.pipeline.stats()

    async def close(self) -> None:
        """See :class:`Engine`."""


@dataclass(frozen=True, slots=True)
class _EmbeddedChat:
    pipeline: Pipeline
    prepared: Prepared
    num_choices: int

    @contextlib.asynccontextmanager
    async def answers(self) -> AsyncIterator[Batches]:
        """See :class:`PreparedChat`."""
        answers: list[Answer] = []
        try:
            for index in range(self.num_choices):
                answers.append(self.pipeline.answer(self.prepared, index))  # noqa: PERF401 - an error must find those before it
            async with contextlib.aclosing(_merge(answers)) as merged:
                yield merged
        finally:
            for answer in answers:
                answer.close()


async def _merge(answers: Sequence[Answer]) -> Batches:
    """The events of several answers as they come; the first error ends all."""
    if len(answers) == 1:
        async for events in answers[0]:
            yield 0, events
        return
    inbox: asyncio.Queue[tuple[int, list[Event]] | K3VLError | None] = asyncio.Queue()

    async def pump(index: int, answer: Answer) -> None:
        try:
            async for events in answer:
                inbox.put_nowait((index, events))
        except K3VLError as exc:
            inbox.put_nowait(exc)
        else:
            inbox.put_nowait(None)

    tasks = [asyncio.create_task(pump(*pair)) for pair in enumerate(answers)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await inbox.get()
            if isinstance(item, K3VLError):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
