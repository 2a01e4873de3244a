"""From a wire request to answers: admission, media, generation, counting. No HTTP in here.

A request is admitted before its body is read, waits for a generation slot once it is prepared, and
gives everything back however it ends; every wait can be cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, Unpack

import pydantic_core

from k3vl.app.openai import ChatCall, Limits, read_call
from k3vl.app.replies import Choice, Chunks, Heading, completion_json, dump, error_json
from k3vl.app.sse import DONE, event
from k3vl.errors import CapacityError, K3VLError, MediaError, RequestError
from k3vl.types import Finish, Prompt, SamplingParams, TextPart
from k3vl.xtml.render import media_parts
from k3vl.xtml.tokens import END_OF_MSG

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

    from k3vl.app.metrics import Metrics
    from k3vl.generation import Answer
    from k3vl.lm.backend import Token
    from k3vl.pipeline import Pipeline, Prepared
    from k3vl.types import Event, MediaPart, ProcessedMedia
    from k3vl.vision.workers import MediaWorkers

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")
SMALL_BODY = 1 << 16
"""Bodies up to this are parsed on the event loop; it takes less than handing them to a thread."""
HEARTBEAT_SECONDS = 5.0
"""A token this recent proves that the engine lives."""
PROBE_SECONDS = 10.0
RETRY_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """How much may go on at once, and what one request may ask for.

    Attributes:
        request: of one request.
        max_running: requests that generate.
        max_waiting: admitted requests beside those.
        media_prefills: requests with media on the way to their first token.
    """

    request: Limits
    max_running: int = 32
    max_waiting: int = 64
    media_prefills: int = 1


class ChatService:
    """Serves chat requests on one event loop."""

    def __init__(
        self,
        pipeline: Pipeline,
        workers: MediaWorkers,
        metrics: Metrics,
        limits: ServiceLimits,
        *,
        sampling: SamplingParams,
    ) -> None:
        """Join the parts.

        Args:
            pipeline: everything but the media.
            workers: the media.
            metrics: where to count.
            limits: how much at once.
            sampling: where a request says nothing.
        """
        self.pipeline, self.workers, self.metrics, self.limits = pipeline, workers, metrics, limits
        self._sampling = sampling
        self._admitted = 0
        self._slots = asyncio.Semaphore(limits.max_running)
        self._media_gate = asyncio.Semaphore(limits.media_prefills)
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="k3vl-prepare")
        self._last_token = float("-inf")
        tokenizer = pipeline.tokenizer
        self._longest_token = max(
            len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size)
        )
        metrics.media_jobs.set_function(lambda: workers.num_jobs)

    async def close(self) -> None:
        """Stop the media workers; the pipeline belongs to the caller."""
        await self.workers.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ before the engine

    @contextlib.contextmanager
    def admission(self) -> Any:
        """Take one of the places for requests that run or wait.

        Raises:
            CapacityError: there is none.
        """
        if self._admitted >= self.limits.max_running + self.limits.max_waiting:
            raise CapacityError(
                f"{self._admitted} requests are running or waiting already",
                retry_after=RETRY_SECONDS,
            )
        self._admitted += 1
        self.metrics.waiting.inc()
        try:
            yield
        finally:
            self._admitted -= 1
            self.metrics.waiting.dec()

    async def read(self, body: bytearray) -> ChatCall:
        """Parse and check a body.

        Raises:
            RequestError: what is wrong with it.
        """
        if len(body) <= SMALL_BODY:
            return self._read(body)
        return await self._in_thread(self._read, body)

    def _read(self, body: bytearray) -> ChatCall:
        try:
            data = pydantic_core.from_json(body, allow_inf_nan=False)
        except ValueError as exc:
            where = str(exc).rpartition(" at ")[2]  # the words in front may quote the body
            raise RequestError(
                f"the body is not valid JSON (at {where})", code="invalid_json"
            ) from None
        return read_call(
            data,
            limits=self.limits.request,
            options=self.pipeline.defaults,
            sampling=self._sampling,
        )

    async def prepare(self, call: ChatCall) -> Prepared:
        """Media on the workers, all of a request's at once; then the prompt, on a thread.

        Raises:
            RequestError: media, conversation or the asked form cannot be used.
            CapacityError: too many media are waiting.
        """
        self._check_length(call)
        with self.metrics.preparation.time():
            tasks = [
                asyncio.create_task(self._process(where, part))
                for where, part in media_parts(call.request.messages)
            ]
            try:
                media: Sequence[ProcessedMedia] = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            return await self._in_thread(self.pipeline.assemble, call.request, media)

    def _check_length(self, call: ChatCall) -> None:
        """Refuse text that cannot fit whatever its tokens are, before time goes into them."""
        context = self.pipeline.context_length
        length = sum(
            len(part.text)
            for message in call.request.messages
            for part in message.parts
            if isinstance(part, TextPart)
        )
        if context is not None and length > context * self._longest_token:
            raise RequestError(
                f"the text has {length} characters; no {context} tokens can hold them",
                param="messages",
                code="context_length_exceeded",
            )

    async def _process(self, where: str, part: MediaPart) -> ProcessedMedia:
        try:
            return await self.workers.process(part)
        except MediaError as exc:
            raise MediaError(f"{where}: {exc}", param=where, code=exc.code) from exc

    async def _in_thread(self, work: Callable[[Unpack[_Args]], _T], *args: *_Args) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    # ------------------------------------------------------------------ answering

    async def whole(self, call: ChatCall, prepared: Prepared) -> bytes:
        """All answers, as one ``chat.completion``."""
        choices = [Choice(index) for index in range(call.num_choices)]
        async with self._generate(call, prepared) as batches:
            async for index, events in batches:
                choices[index].feed(events)
        sampling = call.request.sampling
        return dump(
            completion_json(
                Heading.new(call.model),
                choices,
                warnings=(*call.warnings, *prepared.warnings),
                num_top=sampling.logprobs,
                token_bytes=self.pipeline.tokenizer.token_bytes,
            )
        )

    async def frames(self, call: ChatCall, prepared: Prepared) -> AsyncGenerator[bytes]:
        """All answers, as framed chunks; an error on the way is a frame too."""
        chunks = Chunks(
            Heading.new(call.model),
            include_usage=call.include_usage,
            num_top=call.request.sampling.logprobs,
            token_bytes=self.pipeline.tokenizer.token_bytes,
        )
        warnings = (*call.warnings, *prepared.warnings)
        try:
            async with self._generate(call, prepared) as batches:
                for index in range(call.num_choices):
                    yield chunks.begin(index, warnings if index == 0 else ())
                async for index, events in batches:
                    yield chunks.write(index, events)
        except K3VLError as exc:
            is_request = isinstance(exc, RequestError | CapacityError)
            kind = "invalid_request_error" if is_request else "server_error"
            text = str(exc) if is_request else "the engine failed on this request"
            yield event(dump(error_json(text, kind, code="stream_error")))
            return
        yield chunks.end() + DONE

    @contextlib.asynccontextmanager
    async def _generate(
        self, call: ChatCall, prepared: Prepared
    ) -> AsyncIterator[AsyncIterator[tuple[int, list[Event]]]]:
        """Hold a slot and the generations of a request.

        Media are let into the engine a few at a time: a step that encodes and prefills the pictures
        of many requests at once would hold up every running stream for as long.
        """
        begun = asyncio.get_running_loop().time()
        async with self._slots, contextlib.AsyncExitStack() as gate:
            if prepared.media:
                await gate.enter_async_context(self._media_gate)
            self.metrics.running.inc()
            self.metrics.waiting.dec()
            answers: list[Answer] = []
            try:
                for index in range(call.num_choices):
                    answers.append(self.pipeline.answer(prepared, index))  # noqa: PERF401 - an error must find those before it
                merged = _merge(answers)
                watched = self._watch(merged, gate, begun)
                async with contextlib.aclosing(merged), contextlib.aclosing(watched):
                    yield watched
            finally:
                for answer in answers:
                    answer.close()
                self.metrics.running.dec()
                self.metrics.waiting.inc()

    async def _watch(
        self,
        batches: AsyncIterator[tuple[int, list[Event]]],
        gate: contextlib.AsyncExitStack,
        begun: float,
    ) -> AsyncGenerator[tuple[int, list[Event]]]:
        """Note signs of life, times and counts; open the gate with the first text."""
        loop = asyncio.get_running_loop()
        is_first = True
        async for index, events in batches:
            self._last_token = loop.time()
            if is_first:
                await gate.aclose()
                self.metrics.first_token.observe(self._last_token - begun)
                is_first = False
            last = events[-1]
            if isinstance(last, Finish) and last.usage is not None:
                self.metrics.count(last.usage, is_first=index == 0)
            yield index, events

    # ------------------------------------------------------------------ other routes

    def tokens(self, call: ChatCall, prepared: Prepared) -> dict[str, Any]:
        """The answer of ``/v1/tokenize``."""
        where = [place for place, _ in media_parts(call.request.messages)]
        return {
            "object": "tokenization",
            "model": call.model,
            "tokens": prepared.prompt.token_ids,
            "count": len(prepared.prompt.token_ids),
            "prompt_tokens": prepared.usage.prompt_tokens,
            "image_tokens": prepared.usage.image_tokens,
            "video_tokens": prepared.usage.video_tokens,
            "context_length": self.pipeline.context_length,
            "media": [
                _plan(place, media) for place, media in zip(where, prepared.media, strict=True)
            ],
            "k3vl": {"warnings": [*call.warnings, *prepared.warnings]},
        }

    async def is_ready(self) -> bool:
        """The engine has just made a token, or makes one when asked."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._last_token < HEARTBEAT_SECONDS:
            return True
        beat: asyncio.Future[bool] = loop.create_future()

        def settle(is_alive: bool) -> None:
            if not beat.done():
                beat.set_result(is_alive)

        def sink(item: Token | K3VLError) -> None:
            loop.call_soon_threadsafe(settle, not isinstance(item, K3VLError))

        token_id = self.pipeline.tokenizer.special_ids[END_OF_MSG]
        try:
            request_id = self.pipeline.backend.submit(
                Prompt((token_id,)), SamplingParams(max_tokens=1), sink
            )
        except K3VLError:
            return False
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                is_alive = await beat
        except TimeoutError:
            return False
        finally:
            self.pipeline.backend.cancel(request_id)
        if is_alive:
            self._last_token = loop.time()
        return is_alive


def _plan(where: str, media: ProcessedMedia) -> dict[str, Any]:
    """How one media part was taken."""
    layout = media.layout
    return {
        "part": where,
        "kind": layout.kind,
        "width": layout.width,
        "height": layout.height,
        "tokens": sum(group.num_tokens for group in layout.groups),
        "groups": [
            {
                "tokens": item.num_tokens,
                "grid_thw": item.grid_thw,
                "timestamp": group.timestamp,
            }
            for item, group in zip(media.items, layout.groups, strict=True)
        ],
        "frame_times": media.frame_times,
    }


async def _merge(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, list[Event]]]:
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
