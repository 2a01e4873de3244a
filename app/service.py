"""From a wire request to answers: admission, media, generation, counting. No HTTP in here.

A request is admitted before its body is read, waits for a generation slot once it is prepared, and
gives everything back however it ends; every wait can be cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, Unpack

import pydantic_core

from k3vl.app.openai import ChatCall, Limits, read_call
from k3vl.app.replies import Choice, Chunks, Heading, completion_json, dump
from k3vl.app.sse import DONE
from k3vl.errors import CapacityError, MediaError, RequestError
from k3vl.types import Finish, SamplingParams, TextPart
from k3vl.xtml.render import media_parts

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence

    from k3vl.app.engines import Batches, Engine, PreparedChat
    from k3vl.app.metrics import Metrics
    from k3vl.types import MediaPart, Message, ProcessedMedia
    from k3vl.vision.workers import MediaWorkers

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")
SMALL_BODY = 1 << 16
"""Bodies up to this are parsed on the event loop; it takes less than handing them to a thread."""
HEARTBEAT_SECONDS = 5.0
"""A token this recent proves that the engine lives."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A request that waits for the engine.

    Attributes:
        call: what is asked.
        chat: the engine's own form of it.
        has_media: pictures or clips are in it.
        warnings: about the request and its media.
    """

    call: ChatCall
    chat: PreparedChat
    has_media: bool
    warnings: tuple[str, ...]


class ChatService:
    """Serves chat requests on one event loop."""

    def __init__(
        self,
        engine: Engine,
        workers: MediaWorkers,
        metrics: Metrics,
        limits: ServiceLimits,
        *,
        sampling: SamplingParams,
    ) -> None:
        """Join the parts.

        Args:
            engine: what answers.
            workers: the media.
            metrics: where to count.
            limits: how much at once.
            sampling: where a request says nothing.
        """
        self.engine, self.workers, self.metrics, self.limits = engine, workers, metrics, limits
        self._sampling = sampling
        self._admitted = 0
        self._slots = asyncio.Semaphore(limits.max_running)
        self._media_gate = asyncio.Semaphore(limits.media_prefills)
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="k3vl-prepare")
        self._last_token = float("-inf")
        metrics.media_jobs.set_function(lambda: workers.num_jobs)

    async def close(self) -> None:
        """Stop the media workers and let go of the engine."""
        await self.workers.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self.engine.close()

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

    async def read(self, body: bytes) -> ChatCall:
        """Parse and check a body.

        Raises:
            RequestError: what is wrong with it.
        """
        if len(body) <= SMALL_BODY:
            return self._read(body)
        return await self._in_thread(self._read, body)

    def _read(self, body: bytes) -> ChatCall:
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
            options=self.engine.defaults,
            sampling=self._sampling,
        )

    async def prepare(self, call: ChatCall) -> Ready:
        """Media on the workers, all of a request's at once; then the prompt, on a thread.

        Raises:
            RequestError: media, conversation or the asked form cannot be used.
            CapacityError: too many media are waiting.
        """
        with self.metrics.preparation.time():
            call, media = await self._process_all(call)
            chat = await self._in_thread(self.engine.prepare, call, media)
        return Ready(
            call=call, chat=chat, has_media=bool(media), warnings=_all_warnings(call, media)
        )

    async def _process_all(self, call: ChatCall) -> tuple[ChatCall, Sequence[ProcessedMedia]]:
        """All media of a request, in the order of the prompt; failed ones may become text."""
        self._check_length(call)
        parts = media_parts(call.request.messages)
        tasks = [asyncio.create_task(self._process(call, *item)) for item in parts]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        failed = {
            where: result
            for (where, _), result in zip(parts, results, strict=True)
            if isinstance(result, MediaError)
        }
        media = [result for result in results if not isinstance(result, MediaError)]
        return (without_media(call, failed) if failed else call), media

    def _check_length(self, call: ChatCall) -> None:
        """Refuse text that cannot fit whatever its tokens are, before time goes into them."""
        most = self.engine.most_characters
        length = sum(
            len(part.text)
            for message in call.request.messages
            for part in message.parts
            if isinstance(part, TextPart)
        )
        if most is not None and length > most:
            raise RequestError(
                f"the text has {length} characters; no {self.engine.context_length} tokens can "
                "hold them",
                param="messages",
                code="context_length_exceeded",
            )

    async def _process(
        self, call: ChatCall, where: str, part: MediaPart
    ) -> ProcessedMedia | MediaError:
        """One part; its error is a value where the request can go on without the part."""
        try:
            return await self.workers.process(part)
        except MediaError as exc:
            error = MediaError(f"{where}: {exc}", param=where, code=exc.code)
            if call.media_errors == "placeholder":
                return error
            raise error from exc

    async def _in_thread(self, work: Callable[[Unpack[_Args]], _T], *args: *_Args) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    # ------------------------------------------------------------------ answering

    async def whole(self, ready: Ready) -> bytes:
        """All answers, as one ``chat.completion``."""
        choices = [Choice(index) for index in range(ready.call.num_choices)]
        async with self._generate(ready) as batches:
            async for index, events in batches:
                choices[index].feed(events)
        heading, sampling = Heading.new(ready.call.model), ready.call.request.sampling

        def write() -> bytes:  # log-probabilities of a long answer are megabytes
            return dump(
                completion_json(
                    heading, choices, warnings=ready.warnings, num_top=sampling.logprobs
                )
            )

        return await self._in_thread(write)

    async def frames(self, ready: Ready) -> AsyncGenerator[bytes]:
        """All answers, as framed chunks; the first comes when the engine has taken the request."""
        call = ready.call
        chunks = Chunks(
            Heading.new(call.model),
            include_usage=call.include_usage,
            num_top=call.request.sampling.logprobs,
        )
        async with self._generate(ready) as batches:
            for index in range(call.num_choices):
                yield chunks.begin(index, ready.warnings if index == 0 else ())
            async for index, events in batches:
                yield chunks.write(index, events)
        yield chunks.end() + DONE

    @contextlib.asynccontextmanager
    async def _generate(self, ready: Ready) -> AsyncIterator[Batches]:
        """Hold a slot and the generations of a request.

        Media are let into the engine a few at a time: a step that encodes and prefills the pictures
        of many requests at once would hold up every running stream for as long.
        """
        begun = asyncio.get_running_loop().time()
        async with self._slots, contextlib.AsyncExitStack() as gate:
            if ready.has_media:
                await gate.enter_async_context(self._media_gate)
            self.metrics.running.inc()
            self.metrics.waiting.dec()
            try:
                async with ready.chat.answers() as batches:
                    watched = self._watch(batches, gate, begun)
                    async with contextlib.aclosing(watched):
                        yield watched
            finally:
                self.metrics.running.dec()
                self.metrics.waiting.inc()

    async def _watch(
        self, batches: Batches, gate: contextlib.AsyncExitStack, begun: float
    ) -> Batches:
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

    async def tokenize(self, call: ChatCall) -> bytes:
        """The answer of ``/v1/tokenize``.

        Raises:
            K3VLError: as :meth:`prepare`.
        """
        call, media = await self._process_all(call)
        return await self._in_thread(self._count, call, media)

    def _count(self, call: ChatCall, media: Sequence[ProcessedMedia]) -> bytes:
        prompt, usage = self.engine.count(call, media)
        where = [place for place, _ in media_parts(call.request.messages)]
        counted = {
            "object": "tokenization",
            "model": call.model,
            "tokens": prompt.token_ids,
            "count": len(prompt.token_ids),
            "prompt_tokens": usage.prompt_tokens,
            "image_tokens": usage.image_tokens,
            "video_tokens": usage.video_tokens,
            "context_length": self.engine.context_length,
            "media": [_plan(place, item) for place, item in zip(where, media, strict=True)],
            "k3vl": {"warnings": _all_warnings(call, media)},
        }
        return dump(counted)

    async def is_ready(self) -> bool:
        """The engine has just made a token, or would make one when asked."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._last_token < HEARTBEAT_SECONDS:
            return True
        is_alive = await self.engine.probe()
        if is_alive:
            self._last_token = loop.time()
        return is_alive


def _all_warnings(call: ChatCall, media: Sequence[ProcessedMedia]) -> tuple[str, ...]:
    return (*call.warnings, *(warning for item in media for warning in item.warnings))


def without_media(call: ChatCall, failed: Mapping[str, MediaError]) -> ChatCall:
    """Text in the place of media that cannot be used, and a warning for each.

    Args:
        call: a request that wants to go on without them.
        failed: errors by place, as ``xtml.render.media_parts`` names it.
    """

    def patched(index: int, message: Message) -> Message:
        parts = tuple(
            part
            if (error := failed.get(f"messages[{index}].content[{position}]")) is None
            else TextPart(f"[{getattr(part, 'kind', 'part')} left out: {error.code}]")
            for position, part in enumerate(message.parts)
        )
        return replace(message, parts=parts)

    messages = tuple(patched(*pair) for pair in enumerate(call.request.messages))
    warnings = (f"{error}; a text stands in its place" for error in failed.values())
    return replace(
        call,
        request=replace(call.request, messages=messages),
        warnings=(*call.warnings, *warnings),
    )


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
