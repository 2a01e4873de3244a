"""Many requests at once: who prepares them, who hands answers out, and who reads these.

Who has the last of a request's media writes its prompt; the backend's thread leaves answers in one
queue; the thread that asked reads it. A thread for each request would be woken for each of them,
hundreds at a time, and every one of them would take Python's lock from the engine's thread between
two launches.
"""

from __future__ import annotations

import gc
import queue
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from k3vl.errors import K3VLError
from k3vl.generation import Delivery, Generation
from k3vl.prompt import media_of
from k3vl.xtml.render import media_parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from concurrent.futures import Future

    from k3vl.lm.backend import Token
    from k3vl.pipeline import Pipeline, Prepared, Reply
    from k3vl.types import Event, MediaPart, ProcessedMedia, Request

    Items: TypeAlias = list[Token | K3VLError]

THREADS = 32
"""At most, for media that are made or fetched here: they wait for hosts and decoders, and each may
hold a raster."""
HELD = 4
"""Requests that are held, for each that is in the works: one slow answer does not stop the rest."""
FROZEN_BY_PYTHON = 1000
"""At most, from its start on: 375 objects in 3.12, none in 3.11 and 3.13."""


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Have Python not look for garbage among all that there is now.

    It would, every thousand requests or so: a good part of a second in which no thread runs, as
    torch alone is hundreds of thousands of objects. Whoever has frozen theirs is left alone.
    """
    if gc.get_freeze_count() > FROZEN_BY_PYTHON:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Place:
    """A request on its way to its reply."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.media: list[tuple[str, Future[ProcessedMedia]]] = []  # where, and what it becomes
        self.left = 0  # parts whose media are not there yet
        self.prepared: Prepared | None = None
        self.generation: Generation | None = None
        self.events: list[Event] = []
        self.outcome: Reply | BaseException | None = None
        self.request_id: int | None = None  # in the backend, which it may not have reached


class Bulk:
    """One run over many requests; see :meth:`k3vl.pipeline.Pipeline.replies`."""

    def __init__(self, pipeline: Pipeline, in_flight: int) -> None:
        """Nothing runs yet."""
        self._pipeline, self._in_flight = pipeline, in_flight
        self._places: deque[_Place] = deque()
        self._in_works = 0
        self._inbox: queue.SimpleQueue[tuple[_Place, Items | BaseException]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # The lock guards what follows, and in places what they have left and their numbers.
        self._is_over = False

    def replies(self, requests: Iterable[Request]) -> Iterator[Reply | K3VLError]:
        """Replies and errors, in the order of the requests; leaving early cancels the rest."""
        rest, places = iter(requests), self._places
        threads = min(self._in_flight, THREADS)
        pool = ThreadPoolExecutor(threads, thread_name_prefix="k3vl-prepare")
        try:
            with only_new_garbage():
                self._fill(rest, pool)
                while places:
                    while (outcome := places[0].outcome) is None:
                        self._take(*self._inbox.get())
                        self._fill(rest, pool)
                    places.popleft()
                    if isinstance(outcome, BaseException) and not isinstance(outcome, K3VLError):
                        raise outcome
                    yield outcome
                    self._fill(rest, pool)
        finally:
            with self._lock:
                self._is_over = True
            pool.shutdown(cancel_futures=True)
            for place in places:
                for _, made in place.media:
                    made.cancel()
                if place.outcome is None:
                    self._cancel(place)

    def _fill(self, rest: Iterator[Request], pool: ThreadPoolExecutor) -> None:
        """Begin with as many requests as may be in the works."""
        processor = self._pipeline.bulk_processor
        while self._in_works < self._in_flight and len(self._places) < HELD * self._in_flight:
            try:
                place = _Place(next(rest))
            except StopIteration:
                return
            self._places.append(place)
            self._in_works += 1
            parts = media_parts(place.request.messages)
            if parts and all(processor.is_quick(part) for _, part in parts):
                self._begin(place, parts)
            else:
                pool.submit(self._begin, place, parts)

    def _begin(self, place: _Place, parts: list[tuple[str, MediaPart]]) -> None:
        """Step 1; on a thread of the pool where it takes its time."""
        processor = self._pipeline.bulk_processor
        place.left = 1 + len(parts)
        for where, part in parts:
            made = processor.begin(part)
            place.media.append((where, made))
            made.add_done_callback(lambda _: self._note(place))
        self._note(place)

    def _note(self, place: _Place) -> None:
        """A part of a request is there, or the last has begun; on any thread."""
        with self._lock:
            place.left -= 1
            if place.left or self._is_over:
                return
        self._start(place)

    def _start(self, place: _Place) -> None:
        """Steps 2 to 4, on the thread that had the last part."""
        pipeline = self._pipeline
        try:
            media = [media_of(where, made) for where, made in place.media]
            prepared = pipeline.assemble(place.request, media)
            place.prepared, place.generation = prepared, pipeline.generation(prepared)
            place.media = []
            delivery = Delivery(
                whole=not place.request.sampling.stop,
                send=lambda items: self._inbox.put((place, items)),
            )
            with self._lock:
                if not self._is_over:
                    place.request_id = pipeline.submit(prepared, delivery.put)
        except BaseException as exc:  # noqa: BLE001 - whatever it was, it is told in its turn
            self._inbox.put((place, exc))

    def _take(self, place: _Place, items: Items | BaseException) -> None:
        """Steps 5 and 6, for what has come; drop all that a reply does not need."""
        if place.outcome is not None:
            return  # its stop string came before the end that the backend would have made
        if isinstance(items, BaseException):
            place.outcome = items
        else:
            assert place.generation is not None
            assert place.prepared is not None
            events, error = place.generation.feed_all(items)
            place.events += events
            if error is not None:
                place.outcome = error
            elif place.generation.done:
                place.outcome = self._pipeline.collect(place.prepared, place.events)
                if place.request.sampling.stop:  # or the backend itself has ended it
                    self._cancel(place)
        if place.outcome is not None:
            self._in_works -= 1
            place.prepared, place.events = None, []

    def _cancel(self, place: _Place) -> None:
        """End a generation that nobody reads."""
        with self._lock:
            request_id = place.request_id
        if request_id is not None:
            self._pipeline.backend.cancel(request_id)
