"""Who is asked: the embedded engine, or an endpoint by the captioner's client.

Every question goes the whole way: file on disk, media processor, chat format, model, parser. Asked
``blank``, it goes the same way with a grey picture in place of each picture.
"""

from __future__ import annotations

import hashlib
import io
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from PIL import Image

from k3vl.app.captioning.items import WHOLE, Source
from k3vl.app.captioning.media import Fetched, MediaLoader
from k3vl.app.captioning.rows import Ask
from k3vl.app.evaluation.scores import Said
from k3vl.errors import RequestError
from k3vl.types import MediaPart, Message, SamplingParams, TextPart
from k3vl.vision.inspect import kind_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from k3vl.app.captioning.engines import Engine
    from k3vl.app.captioning.media import Loaded
    from k3vl.app.evaluation.labels import Question
    from k3vl.pipeline import Pipeline, Reply
    from k3vl.types import ProcessedMedia, Request

MAX_TOKENS = 160
_GREY = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What came back.

    Attributes:
        said: what is scored.
        finish: why it ended.
        confidence: geometric mean of the probabilities of the answer's tokens, where known.
        tokens: of the answer.
        media_seconds: reading and decoding the files.
        answer_seconds: from the decoded media to the whole answer.
    """

    said: Said
    finish: str
    confidence: float | None = None
    tokens: int = 0
    media_seconds: float = 0.0
    answer_seconds: float = 0.0


class Asked(Protocol):
    """Answers questions on any thread."""

    name: str

    def ask(self, question: Question, *, blank: bool) -> tuple[Told, Told | None]:
        """The answer, and the one about grey pictures where it is asked for and can be.

        Raises:
            K3VLError: there is no answer.
        """


class LocalAsked:
    """The embedded engine."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.name = pipeline.name
        self._pipeline = pipeline

    def ask(self, question: Question, *, blank: bool) -> tuple[Told, Told | None]:
        """See :class:`Asked`."""
        start = time.perf_counter()
        request = self._request(question)
        parts = [
            part
            for message in request.messages
            for part in message.parts
            if isinstance(part, MediaPart)
        ]
        media = [self._pipeline.processor.process(part) for part in parts]
        seconds = time.perf_counter() - start
        told = self._told(request, media, seconds)
        grey = self._told(request, [_grey(item) for item in media], 0.0) if blank else None
        return told, grey

    def _request(self, question: Question) -> Request:
        messages = []
        for turn in question.history:
            messages.append(_asked(turn.files, turn.prompt))
            messages.append(Message(role="assistant", parts=(TextPart(turn.answer),)))
        messages.append(_asked(question.files, question.prompt))
        options = replace(self._pipeline.defaults, **question.options)
        if "thinking" in question.options and "thinking_effort" not in question.options:
            options = replace(options, thinking_effort=None)
        return self._pipeline.request(
            messages,
            tools=question.tools,
            options=options,
            sampling=SamplingParams(max_tokens=MAX_TOKENS, logprobs=0),
        )

    def _told(self, request: Request, media: list[ProcessedMedia], seconds: float) -> Told:
        start = time.perf_counter()
        reply = self._pipeline.complete(self._pipeline.assemble(request, media))
        return Told(
            said=Said(reply.content, _calls(reply)),
            finish=reply.finish,
            confidence=reply.confidence,
            tokens=reply.usage.completion_tokens,
            media_seconds=seconds,
            answer_seconds=time.perf_counter() - start,
        )


def _asked(files: Sequence[Path], prompt: str) -> Message:
    media = tuple(MediaPart(kind_of(path), path) for path in files)
    return Message(role="user", parts=(*media, TextPart(prompt)))


def _calls(reply: Reply) -> tuple[dict[str, Any], ...]:
    return tuple(
        {
            "name": call.name,
            "arguments": call.arguments if isinstance(call.arguments, str) else {**call.arguments},
        }
        for call in reply.tool_calls
    )


def _grey(media: ProcessedMedia) -> ProcessedMedia:
    """The same layout with nothing to see."""
    items = tuple(
        replace(
            item,
            # Equal digests mean equal features, so the digest says what this is.
            digest=hashlib.sha256(f"grey {item.grid_thw}".encode()).hexdigest(),
            patches=np.full_like(item.patches, _GREY),
        )
        for item in media.items
    )
    return replace(media, items=items)


class RemoteAsked:
    """An OpenAI-compatible endpoint; one file a question, no tools, the endpoint's own options."""

    def __init__(self, engine: Engine) -> None:
        self.name = engine.name
        self._engine = engine
        self._loader = MediaLoader(engine.processor)

    def ask(self, question: Question, *, blank: bool) -> tuple[Told, Told | None]:
        """See :class:`Asked`."""
        if len(question.files) != 1 or question.history or question.tools or question.options:
            raise RequestError(
                "several files, history, tools and options are not sent to an endpoint"
            )
        start = time.perf_counter()
        path = question.files[0]
        fetched = self._loader.fetch(Source(id=path.name, path=path.name, media=path))
        loaded = self._loader.decode(fetched, WHOLE)
        seconds = time.perf_counter() - start
        told = self._told(loaded, question, seconds)
        if not blank or loaded.seen.kind != "image":
            return told, None
        stream = io.BytesIO()
        size = (loaded.seen.width, loaded.seen.height)
        Image.new("RGB", size, (_GREY,) * 3).save(stream, "PNG")
        data = stream.getvalue()
        grey = Fetched(data, "image", hashlib.sha256(data).hexdigest())
        return told, self._told(self._loader.decode(grey, WHOLE), question, 0.0)

    def _told(self, loaded: Loaded, question: Question, seconds: float) -> Told:
        sampling = SamplingParams(max_tokens=MAX_TOKENS)
        ask = Ask(prompt_id="eval", text=question.prompt, sampling=sampling)
        answer = self._engine.answer(loaded, ask, None)
        return Told(
            said=Said(answer.text),
            finish=answer.finish,
            tokens=answer.usage.completion_tokens,
            media_seconds=seconds,
            answer_seconds=answer.latency,
        )
