"""One item on one thread: fetched, decoded, asked about; equal content only once."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from k3vl.app.captioning.media import Fetched, Loaded, MediaLoader, thumbnail
from k3vl.app.captioning.rows import (
    Answer,
    Ask,
    ItemTimeoutError,
    Origin,
    Row,
    Seen,
    caption_row,
    error_row,
)
from k3vl.app.captioning.sidecars import Sidecars, old_caption
from k3vl.errors import BackendError, K3VLError, MediaError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from k3vl.app.captioning.engines import Engine
    from k3vl.app.captioning.items import Item, Piece
    from k3vl.app.captioning.prompts import Prompt, Prompts

REMEMBERED = 65_536
"""Answers kept for later files with the same content; some 40 MB."""
Content: TypeAlias = "tuple[str, Piece, str]"
"""Digest of the file, which part of it, what is asked."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What became of an item.

    Attributes:
        item: which.
        rows: in the order of its prompts.
        fetched: its bytes; None where they could not be had.
        thumbnail: a small JPEG; None where none was asked for.
    """

    item: Item
    rows: tuple[tuple[Prompt, Row], ...]
    fetched: Fetched | None = None
    thumbnail: bytes | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """An answer that others with the same content may take."""

    id: str
    seen: Seen
    answer: Answer
    data: Any
    thumbnail: bytes | None


class Worker:
    """Captions items; safe on any thread.

    Args:
        loader: makes media of them.
        prompts: what is asked.
        engine: who answers.
        sidecars: where old captions are looked for.
        origin: what all rows share.
        item_seconds: longest time for one item.
        thumbnails: make small pictures.
    """

    def __init__(
        self,
        *,
        loader: MediaLoader,
        prompts: Prompts,
        engine: Engine,
        sidecars: Sidecars,
        origin: Origin,
        item_seconds: float | None,
        thumbnails: bool,
    ) -> None:
        self.loader = loader
        self.prompts = prompts
        self.engine = engine
        self.sidecars = sidecars
        self.origin = origin
        self.item_seconds = item_seconds
        self.thumbnails = thumbnails
        self.shared = _Shared(REMEMBERED)
        # Rasters are large: only this many are held at once, however many items wait for answers.
        self.decoding = threading.Semaphore(max(2, min(os.cpu_count() or 2, 8)))

    def caption(self, item: Item, prompts: Sequence[Prompt]) -> Outcome:
        """Rows for an item; nothing that happens here ends the run."""
        work = _Work(self, item)
        rows: list[tuple[Prompt, Row]] = []
        for prompt in prompts:
            try:
                row = work.row(prompt)
            except K3VLError as exc:
                row = error_row(item, prompt.id, exc, self.origin, work.fetched)
            except Exception as exc:  # noqa: BLE001 - one file's surprise must not end the run
                bug = BackendError(f"unexpected {type(exc).__name__}")
                row = error_row(item, prompt.id, bug, self.origin, work.fetched)
            rows.append((prompt, row))
        return Outcome(item, tuple(rows), work.fetched, work.thumbnail)


class _Work:
    """One item in the works: fetched and decoded once, when first needed."""

    def __init__(self, worker: Worker, item: Item) -> None:
        self._worker = worker
        self._item = item
        limit = worker.item_seconds
        self._end = None if limit is None else time.monotonic() + limit
        self._loaded: Loaded | None = None
        self.fetched: Fetched | None = None
        self.thumbnail: bytes | None = None

    def row(self, prompt: Prompt) -> Row:
        """The row of one prompt.

        Raises:
            K3VLError: why there is no caption.
        """
        worker, item = self._worker, self._item
        if self.fetched is None:
            self.fetched = worker.loader.fetch(item.source)
        kind = "video" if item.piece.animated else self.fetched.kind
        ask = worker.prompts.ask(
            item, prompt, kind, lambda: old_caption(item.source, worker.sidecars)
        )
        made = worker.shared.get(
            (self.fetched.digest, item.piece, ask.text), lambda: self._make(ask)
        )
        self.thumbnail = made.thumbnail
        row = caption_row(
            item,
            made.seen,
            ask,
            made.answer,
            caption=worker.prompts.finish(made.answer.text),
            data=made.data,
            origin=worker.origin,
        )
        if made.id != item.id:
            row["duplicate_of"] = made.id
        return row

    def _make(self, ask: Ask) -> _Made:
        worker = self._worker
        loaded = self._load()
        answer = worker.engine.answer(loaded, ask, self._left())
        data = None if ask.schema is None else ask.schema.read(answer.text, answer.finish)
        return _Made(self._item.id, loaded.seen, answer, data, self.thumbnail)

    def _load(self) -> Loaded:
        if self._loaded is None:
            assert self.fetched is not None
            with self._worker.decoding:
                self._loaded = self._worker.loader.decode(self.fetched, self._item.piece)
                if self._worker.thumbnails:
                    self.thumbnail = thumbnail(self._loaded.media)
        return self._loaded

    def _left(self) -> float | None:
        if self._end is None:
            return None
        left = self._end - time.monotonic()
        if left <= 0:
            raise ItemTimeoutError(f"no answer within {self._worker.item_seconds:g} s")
        return left


class _Shared:
    """Answers by content: whoever comes first makes it, the others wait for it or find it.

    A file that cannot be decoded is so for all; any other failure is each one's own.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._answers: OrderedDict[Content, Future[_Made]] = OrderedDict()

    def get(self, content: Content, make: Callable[[], _Made]) -> _Made:
        """The answer for a content.

        Raises:
            K3VLError: what ``make`` raised, here or where it was first called.
        """
        with self._lock:
            theirs = self._answers.get(content)
            if theirs is None:
                mine: Future[_Made] = Future()
                self._answers[content] = mine
                while len(self._answers) > self._limit:
                    self._answers.popitem(last=False)
        if theirs is not None:
            try:
                return theirs.result()
            except MediaError:
                raise
            except Exception:  # noqa: BLE001 - somebody else's trouble; this one tries for itself
                return make()
        try:
            made = make()
        except BaseException as exc:
            if not isinstance(exc, MediaError):
                with self._lock:
                    self._answers.pop(content, None)
            mine.set_exception(exc)
            raise
        mine.set_result(made)
        return made
