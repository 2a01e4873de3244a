"""Messages in, events out: read this file first.

The way of a request, in six steps:

1. the media of the messages are fetched, decoded and cut into patches     ``vision.processor``
2. messages and media layouts are written in K3's chat format               ``xtml.render``
3. every segment is tokenised on its own; runs of pads become media spans   ``xtml.tokenizer``
4. the backend encodes the media, prefills and decodes                      ``lm.backend``
5. token ids become text and control pieces                                 ``xtml.tokenizer``
6. pieces become typed events: reasoning, content, tool calls, finish       ``xtml.parser``

This is the only place where ``vision``, ``xtml`` and ``lm`` meet. Every front end renders the same
events.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from k3vl.bulk import Bulk
from k3vl.constrain import ConstraintCompiler
from k3vl.errors import BackendError, CapacityError, K3VLError
from k3vl.generation import Answer, Delivery, Generation, Inbox, confidence_of
from k3vl.lm.backend import HoldsFeatures, ReportsStats, TakesWeights
from k3vl.prompt import PromptWriter, media_of
from k3vl.types import (
    ChatOptions,
    Finish,
    Message,
    Request,
    SamplingParams,
    TextPart,
)
from k3vl.xtml.messages import parse_messages, parse_tools
from k3vl.xtml.parser import collect
from k3vl.xtml.render import media_parts

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Callable,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    from k3vl.constrain import Constraint
    from k3vl.lm.backend import Backend, InFlight, Token
    from k3vl.lm.stats import EngineStats
    from k3vl.load import WeightLoader
    from k3vl.types import Event, FinishReason, MediaLayout, ProcessedMedia, Prompt, ToolCall, Usage
    from k3vl.vision.processor import MediaProcessor
    from k3vl.xtml.tokenizer import Tokenizer

    Messages = str | Sequence[Message] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request that only the language model has not seen yet.

    Attributes:
        request: what was asked.
        prompt: token ids and media spans.
        media: one per media part, in the order of the prompt.
        usage: the prompt's share of the counts.
        constraint: the form that the answer must have, if any.
    """

    request: Request
    prompt: Prompt
    media: tuple[ProcessedMedia, ...]
    usage: Usage
    constraint: Constraint | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was repaired or ignored in the media."""
        return tuple(warning for media in self.media for warning in media.warnings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A whole answer.

    Attributes:
        content: the answer itself.
        reasoning: the think channel.
        tool_calls: calls that the model wants made.
        finish: why it ended.
        usage: token counts.
        media: upright size and groups of every media part of the request.
        warnings: what was repaired or ignored in them.
        confidence: geometric mean of the probabilities of the content's tokens, where the request
            asked for log-probabilities; None without them, or without content.
    """

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish: FinishReason
    usage: Usage
    media: tuple[MediaLayout, ...] = ()
    warnings: tuple[str, ...] = ()
    confidence: float | None = None


class Pipeline:
    """Everything between chat messages and the events of an answer.

    One instance serves any number of threads and event loops at once. Use it as a context manager,
    or call :meth:`close`.

    Example:
        >>> with Pipeline.load() as pipeline:
        ...     picture = MediaPart("image", Path("cat.png"))
        ...     message = Message(role="user", parts=(picture, TextPart("What is this?")))
        ...     print(pipeline.reply([message]).content)
    """

    def __init__(
        self,
        *,
        processor: MediaProcessor,
        bulk_processor: MediaProcessor | None = None,
        tokenizer: Tokenizer,
        backend: Backend,
        media_pad_id: int,
        defaults: ChatOptions,
        name: str,
        context_length: int | None = None,
        weights: WeightLoader | None = None,
        min_confidence: float | None = None,
    ) -> None:
        """Join the three worlds.

        Args:
            processor: prepares media.
            bulk_processor: prepares the media of many requests at once, by the same rules; None:
                ``processor`` does.
            tokenizer: the checkpoint's.
            backend: runs the language model.
            media_pad_id: ``media_placeholder_token_id`` of config.json.
            defaults: chat options of requests that bring none.
            name: how the model is called in results.
            context_length: tokens of prompt and answer together, where the backend has a limit.
            weights: reads other weights for an embedded engine.
            min_confidence: below this the checkpoint's answers are better not trusted.
        """
        self.processor = processor
        self._bulk_processor = bulk_processor
        self.tokenizer = tokenizer
        self.backend = backend
        self.writer = PromptWriter(tokenizer, media_pad_id)
        self.defaults = defaults
        self.name = name
        self.context_length = context_length
        self.min_confidence = min_confidence
        self.constraints = ConstraintCompiler(tokenizer)
        self._weights = weights

    @classmethod
    def load(cls, checkpoint: str | Path = "demo", **settings: Any) -> Self:
        """Open a checkpoint directory with the embedded engine.

        Args:
            checkpoint: a directory, or ``demo`` for the small model that comes with the package.
            settings: see :func:`k3vl.load.open_checkpoint`.

        Raises:
            ConfigError: the directory or its configuration is not usable.
            WeightError: the tensors are not.
        """
        from k3vl.load import open_checkpoint

        parts = open_checkpoint(checkpoint, **settings)
        return cls(
            processor=parts.processor,
            bulk_processor=parts.bulk_processor,
            tokenizer=parts.tokenizer,
            backend=parts.backend,
            media_pad_id=parts.media_pad_id,
            defaults=parts.defaults,
            name=parts.name,
            context_length=parts.context_length,
            weights=parts.weights,
            min_confidence=parts.min_confidence,
        )

    def __enter__(self) -> Self:
        """Nothing to do; the pipeline is ready."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the backend."""
        self.close()

    @property
    def bulk_processor(self) -> MediaProcessor:
        """Prepares the media of many requests at once."""
        return self._bulk_processor or self.processor

    @bulk_processor.setter
    def bulk_processor(self, processor: MediaProcessor | None) -> None:
        self._bulk_processor = processor

    def close(self) -> None:
        """Cancel everything and release the model."""
        self.backend.close()
        self.bulk_processor.close()

    def holds_features(self, digest: str) -> bool:
        """Whether a media item would not have to be encoded; False where the backend cannot say."""
        return isinstance(self.backend, HoldsFeatures) and self.backend.holds_features(digest)

    def stats(self) -> EngineStats | None:
        """Caches, memory and times of the backend; None where it reports none."""
        return self.backend.stats() if isinstance(self.backend, ReportsStats) else None

    def update_weights(self, directory: str | Path, *, in_flight: InFlight = "finish") -> None:
        """Go on with the weights of another checkpoint of the same model, without a restart.

        They are read beside the running ones, on the calling thread; whatever is wrong with them,
        nothing has changed. See :meth:`k3vl.lm.local.LocalBackend.update` for requests in flight.

        Raises:
            ConfigError: it is another model's checkpoint.
            WeightError: a tensor is missing, left over, of the wrong shape, damaged or not finite.
            CapacityError: there is no memory for both.
            BackendError: the engine is dead, or not an embedded one.
        """
        if not isinstance(self.backend, TakesWeights) or self._weights is None:
            raise BackendError("only an embedded engine takes other weights")
        self.backend.update(*self._weights.load_beside(Path(directory)), in_flight=in_flight)

    # ------------------------------------------------------------------ asking

    def request(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: ChatOptions | None = None,
        sampling: SamplingParams | None = None,
    ) -> Request:
        """Make a request of a user's text, typed messages, or OpenAI-style mappings.

        Raises:
            TemplateError: a mapping is not a message; ``param`` says where.
        """
        if isinstance(messages, str):
            messages = (Message(role="user", parts=(TextPart(messages),)),)
        if not all(isinstance(message, Message) for message in messages):
            messages = parse_messages(messages)
        return Request(
            messages=tuple(m for m in messages if isinstance(m, Message)),
            tools=parse_tools(list(tools)),
            options=options or self.defaults,
            sampling=sampling or SamplingParams(),
        )

    def prepare(self, request: Request, *, processor: MediaProcessor | None = None) -> Prepared:
        """Steps 1 to 3: from messages to token ids and media spans.

        Args:
            request: what is asked.
            processor: prepares its media; None: the pipeline's.

        Raises:
            MediaError: a media part cannot be used; ``param`` says which.
            TemplateError: the chat format cannot express the conversation.
        """
        processor, parts = processor or self.processor, media_parts(request.messages)
        return self.assemble(
            request, [media_of(where, processor.begin(part)) for where, part in parts]
        )

    def assemble(self, request: Request, media: Sequence[ProcessedMedia]) -> Prepared:
        """Steps 2 and 3, for media that were processed elsewhere.

        Args:
            request: what is asked.
            media: one for each of ``xtml.render.media_parts(request.messages)``, in that order.

        Raises:
            TemplateError: the chat format cannot express the conversation.
            RequestError: the asked form of the answer cannot be enforced.
        """
        prompt, usage = self.writer.write(request, media)
        return Prepared(
            request=request,
            prompt=prompt,
            media=tuple(media),
            constraint=self.constraints.compile(request),
            usage=usage,
        )

    # ------------------------------------------------------------------ answering

    async def stream(
        self,
        messages: Messages | Request,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: ChatOptions | None = None,
        sampling: SamplingParams | None = None,
    ) -> AsyncIterator[Event]:
        """Answer, event by event; closing the iterator cancels the generation.

        Raises:
            K3VLError: whatever went wrong, at the point where it did.
        """
        request = self._as_request(messages, tools, options, sampling)
        prepared = await asyncio.to_thread(self.prepare, request)
        with contextlib.closing(self.answer(prepared)) as answer:
            async for events in answer:
                for event in events:
                    yield event

    def answer(self, prepared: Prepared, index: int = 0) -> Answer:
        """Steps 4 to 6 for a prepared request, on a running event loop.

        Args:
            prepared: may be answered any number of times; its media are encoded once as long as the
                encoder cache holds them.
            index: which of several answers this is; moves the seed.

        Returns:
            The answer in the making: iterate over it, and close it whatever happens.

        Raises:
            CapacityError: the request can never run.
            BackendError: the engine is dead.
        """
        inbox, generation = Inbox(asyncio.get_running_loop()), self.generation(prepared)
        request_id = self.submit(prepared, inbox.put, index)
        return Answer(generation, inbox, lambda: self.backend.cancel(request_id))

    def events(
        self,
        messages: Messages | Request,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: ChatOptions | None = None,
        sampling: SamplingParams | None = None,
    ) -> Iterator[Event]:
        """As :meth:`stream`, for callers without an event loop."""
        request = self._as_request(messages, tools, options, sampling)
        return self._events(self.prepare(request))

    def reply(
        self,
        messages: Messages | Request,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: ChatOptions | None = None,
        sampling: SamplingParams | None = None,
    ) -> Reply:
        """Answer as a whole.

        Raises:
            K3VLError: whatever went wrong.
        """
        request = self._as_request(messages, tools, options, sampling)
        return self.complete(self.prepare(request))

    def complete(self, prepared: Prepared, *, seconds: float | None = None) -> Reply:
        """Steps 4 to 6 for a prepared request, as a whole.

        Raises:
            K3VLError: whatever went wrong; ``CapacityError`` when it takes longer than ``seconds``.
        """
        return self.collect(prepared, list(self._events(prepared, seconds, whole=True)))

    def collect(self, prepared: Prepared, events: Sequence[Event]) -> Reply:
        """The reply that all events of an answer make."""
        answer, last = collect(events), events[-1]
        assert isinstance(last, Finish)
        assert last.usage is not None
        return Reply(
            content=answer.content,
            reasoning=answer.reasoning,
            tool_calls=answer.tool_calls,
            finish=last.reason,
            usage=last.usage,
            media=tuple(media.layout for media in prepared.media),
            warnings=prepared.warnings,
            confidence=confidence_of(events),
        )

    def replies(
        self, requests: Iterable[Request], *, in_flight: int = 16
    ) -> Iterator[Reply | K3VLError]:
        """Answer many requests, in their order; media work overlaps generation.

        At most ``in_flight`` requests are in the works at a time, and four times as many are held
        while the first of them is not done, so any number may be streamed through. A request that
        fails yields its error in place of a reply and hurts no other.
        """
        return Bulk(self, in_flight).replies(requests)

    def _as_request(
        self,
        messages: Messages | Request,
        tools: Sequence[Mapping[str, Any]],
        options: ChatOptions | None,
        sampling: SamplingParams | None,
    ) -> Request:
        if not isinstance(messages, Request):
            return self.request(messages, tools=tools, options=options, sampling=sampling)
        if tools or options or sampling:
            return replace(
                messages,
                tools=tuple(tools) or messages.tools,
                options=options or messages.options,
                sampling=sampling or messages.sampling,
            )
        return messages

    def generation(self, prepared: Prepared) -> Generation:
        """Steps 5 and 6 of an answer, for what the backend will deliver."""
        return Generation(self.tokenizer, prepared.request, prepared.usage)

    def submit(
        self, prepared: Prepared, sink: Callable[[Token | K3VLError], None], index: int = 0
    ) -> int:
        """Step 4: hand the prompt to the backend; the answer's number there.

        Args:
            prepared, index: see :meth:`answer`.
            sink: see :class:`k3vl.lm.backend.Backend`.

        Raises:
            CapacityError: the request can never run.
            BackendError: the engine is dead.
        """
        sampling = prepared.request.sampling
        if prepared.constraint is not None:
            sampling = replace(sampling, logit_mask=prepared.constraint.mask())
        if index and sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + index)
        return self.backend.submit(prepared.prompt, sampling, sink)

    def _events(
        self, prepared: Prepared, seconds: float | None = None, *, whole: bool = False
    ) -> Iterator[Event]:
        """Steps 4 to 6; ``whole`` where nobody reads them before the last.

        With a stop string the answer may end before the backend would end it, so that every token
        is looked at when it comes.
        """
        end = None if seconds is None else time.monotonic() + seconds
        sent: queue.SimpleQueue[list[Token | K3VLError]] = queue.SimpleQueue()
        delivery = Delivery(whole=whole and not prepared.request.sampling.stop, send=sent.put)
        generation = self.generation(prepared)
        request_id = self.submit(prepared, delivery.put)
        try:
            while not generation.done:
                left = None if end is None else max(end - time.monotonic(), 0.0)
                events, error = generation.feed_all(sent.get(timeout=left))
                yield from events
                if error is not None:
                    raise error
        except queue.Empty:
            raise CapacityError(f"no answer within {seconds:g} s") from None
        finally:
            self.backend.cancel(request_id)
