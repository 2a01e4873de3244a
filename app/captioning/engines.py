"""What captions an item: the seam between run and model, and the embedded engine behind it."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from k3vl.app.captioning.rows import Answer, Ask, ItemTimeoutError
from k3vl.config import checkpoint_path
from k3vl.errors import CapacityError, ConfigError, RequestError
from k3vl.types import MediaPart, Message, TextPart

if TYPE_CHECKING:
    from k3vl.app.captioning.media import Loaded
    from k3vl.app.captioning.schema import Schema
    from k3vl.pipeline import Pipeline
    from k3vl.types import ChatOptions
    from k3vl.vision.processor import MediaProcessor

UNSURE = "I am not sure."
LOCAL_PARALLEL = 32
"""As many requests as the embedded engine runs at once."""


class Engine(Protocol):
    """Captions one item at a time on each of many threads.

    Attributes:
        name, revision: which model it is.
        processor: prepares media for it.
        parallel: calls of :meth:`answer` that it can make use of at once.
    """

    name: str
    revision: str
    processor: MediaProcessor
    parallel: int

    def answer(self, loaded: Loaded, ask: Ask, seconds: float | None) -> Answer:
        """Caption an item.

        Raises:
            K3VLError: whatever went wrong with this one.
        """

    def close(self) -> None:
        """End every call that is running; they raise."""


class LocalEngine:
    """The embedded engine; requests of many threads are batched by it.

    Args:
        pipeline: with the model.
        parallel: requests at once.
        min_confidence: a caption of less is :data:`UNSURE`; None takes the checkpoint's own, 0
            takes every caption.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        parallel: int = LOCAL_PARALLEL,
        min_confidence: float | None = None,
    ) -> None:
        self.name = pipeline.name
        self.revision = checkpoint_revision(pipeline.name)
        self.processor = pipeline.bulk_processor
        self.parallel = parallel
        self._pipeline = pipeline
        own = pipeline.min_confidence if min_confidence is None else min_confidence
        self._min_confidence = own or 0.0

    def answer(self, loaded: Loaded, ask: Ask, seconds: float | None) -> Answer:
        """See :class:`Engine`."""
        start = time.monotonic()
        part = MediaPart(loaded.media.layout.kind, loaded.fetched.data)
        message = Message(role="user", parts=(part, TextPart(ask.text)))
        # What must fit a schema cannot say that it is not sure.
        least = self._min_confidence if ask.schema is None else 0.0
        sampling = replace(ask.sampling, logprobs=0) if least else ask.sampling
        request = self._pipeline.request(
            [message], options=self._options(ask.schema), sampling=sampling
        )
        prepared = self._pipeline.assemble(request, [loaded.media])
        try:
            reply = self._pipeline.complete(prepared, seconds=seconds)
        except CapacityError as exc:
            if seconds is not None and time.monotonic() - start >= seconds:
                raise ItemTimeoutError(str(exc)) from exc
            raise
        unsure = reply.confidence is not None and reply.confidence < least
        return Answer(
            text=UNSURE if unsure else reply.content,
            reasoning=reply.reasoning,
            finish=reply.finish,
            usage=reply.usage,
            latency=time.monotonic() - start,
            confidence=reply.confidence,
            guess=reply.content if unsure else None,
        )

    def check(self, schema: Schema) -> None:
        """Make sure that a schema can be enforced, before any work.

        Raises:
            ConfigError: it goes beyond what the grammars express.
        """
        try:
            self._pipeline.constraints.compile(
                self._pipeline.request("", options=self._options(schema))
            )
        except RequestError as exc:
            raise ConfigError(f"--json-schema: {exc}") from exc

    def _options(self, schema: Schema | None) -> ChatOptions:
        defaults = self._pipeline.defaults
        if schema is None:
            return defaults
        # As the server passes it on: the model is shown the schema alone.
        wanted = {"type": "json_schema", "json_schema": {"schema": schema.asked}}
        return replace(defaults, response_format=wanted)

    def close(self) -> None:
        """See :class:`Engine`."""
        self._pipeline.close()


def checkpoint_revision(name: str) -> str:
    """12 hex digits that change with a checkpoint's configuration or weight files.

    Weights count by name and size, not by content: they may be terabytes.
    """
    digest = hashlib.sha256()
    directory = checkpoint_path(name)
    if not directory.is_dir():
        return ""
    for path in sorted(directory.iterdir()):
        if path.suffix == ".json":
            digest.update(path.read_bytes())
        elif path.suffix == ".safetensors":
            digest.update(f"{path.name} {path.stat().st_size}\0".encode())
    return digest.hexdigest()[:12]
