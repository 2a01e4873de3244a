"""A processor whose decoding other processes do, so that Python's lock here is the engine's.

Files are found, fetched and refused here, by the rules of :class:`MediaProcessor`; bytes go to a
worker (``worker.py``) and patches come back. Whoever has a part writes it to a worker that is idle,
and one thread reads what all of them answer: a thread for each part would take the lock when it is
woken, when it has read, when it has written, each time from the engine's thread. The server has a
pool of its own, with deadlines, on its event loop (``workers.py``).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from collections import deque
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from k3vl.errors import Cancelled, MediaError
from k3vl.types import MediaPart
from k3vl.vision.limits import DEFAULT_LIMITS, MediaLimits
from k3vl.vision.processor import MediaProcessor
from k3vl.vision.source import DEFAULT_POLICY, FetchPolicy, resolve
from k3vl.vision.worker import settings_header
from k3vl.vision.workers import DEFAULT_MEMORY, GIVES_WAY, Worker, num_workers_here

if TYPE_CHECKING:
    from k3vl.config import MediaConfig
    from k3vl.types import Detail, ProcessedMedia


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A part on its way through a worker."""

    part: MediaPart
    source: bytes | Path
    future: Future[ProcessedMedia] = field(default_factory=Future)

    def end(self, outcome: ProcessedMedia | BaseException) -> None:
        with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
            if isinstance(outcome, BaseException):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)


class PooledProcessor(MediaProcessor):
    """As its base, with bytes and paths decoded elsewhere; a PIL image is here already.

    A worker is started when a part finds none that is idle, and ends when the pool is closed or
    this process has ended, in whatever way. The thread that reads lives as long as any of them.

    Args:
        config, limits, policy, keep_bytes: see :class:`MediaProcessor`.
        num_workers: processes at most; None: :func:`num_workers_here`.
    """

    def __init__(
        self,
        config: MediaConfig,
        *,
        limits: MediaLimits = DEFAULT_LIMITS,
        policy: FetchPolicy = DEFAULT_POLICY,
        keep_bytes: int = 0,
        num_workers: int | None = None,
    ) -> None:
        super().__init__(config, limits=limits, policy=policy, keep_bytes=keep_bytes)
        self._settings = settings_header(
            config, limits, None, policy.max_bytes, "patches", DEFAULT_MEMORY, GIVES_WAY
        )
        self._most = num_workers or num_workers_here()
        self._lock = threading.Lock()
        # The lock guards what follows.
        self._idle: list[Worker] = []
        self._busy: dict[Worker, _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._answers = selectors.DefaultSelector()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def close(self) -> None:
        """End the workers; parts that are under way fail."""
        with self._lock:
            self._is_closed = True
            for worker in (*self._idle, *self._busy):  # the thread reaps them
                worker.kill()
            waiting, thread = list(self._waiting), self._thread
            self._waiting.clear()
        for job in waiting:
            job.end(_closed())
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def is_quick(self, part: MediaPart) -> bool:
        """See :class:`MediaProcessor`: files and bytes, unless pictures are kept by content."""
        return isinstance(part.source, bytes | os.PathLike) and not self._kept.max_bytes

    def begin(self, part: MediaPart) -> Future[ProcessedMedia]:
        """See :class:`MediaProcessor`; it is the worker that finds, or refuses, a file."""
        if not self.is_quick(part):
            return super().begin(part)
        future: Future[ProcessedMedia] = Future()
        try:
            source = part.source
            if not isinstance(source, Path):
                source = resolve(source, part.kind, self.policy)
            assert isinstance(source, bytes | Path)
            self._enter(_Job(part, source, future))
        except BaseException as exc:  # noqa: BLE001 - whoever asks for the result is told
            future.set_exception(exc)
        return future

    def _process_image(
        self, source: bytes | Path | Image.Image, detail: Detail | None
    ) -> ProcessedMedia:
        if isinstance(source, Image.Image):
            return super()._process_image(source, detail)
        return self._enter(_Job(MediaPart("image", b"", detail), source)).result()

    def _process_video(self, source: bytes | Path) -> ProcessedMedia:
        return self._enter(_Job(MediaPart("video", b""), source)).result()

    # ------------------------------------------------------------------ workers

    def _enter(self, job: _Job) -> Future[ProcessedMedia]:
        """Have a worker do it, now or when one is idle."""
        with self._lock:
            if self._is_closed:
                raise _closed()
            self._waiting.append(job)
        self._hand_out()
        return job.future

    def _hand_out(self) -> None:
        """Give parts that wait to idle workers; on any thread."""
        while True:
            worker, outcome = None, None
            with self._lock:
                while self._waiting and self._waiting[0].future.cancelled():
                    self._waiting.popleft()
                if not self._waiting:
                    return
                try:
                    worker = self._find_worker()
                except OSError as exc:  # the system has no process or no memory for one
                    outcome = exc
                if worker is None and outcome is None:
                    return
                job = self._waiting.popleft()
                if worker is not None:
                    self._busy[worker] = job
            if worker is not None:
                worker.send(job.part, job.source)
            elif outcome is not None:
                job.end(outcome)

    def _find_worker(self) -> Worker | None:
        """One that is idle, or new; the lock is held."""
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive():  # or it died of something else, for which no part must pay
                return worker
        if len(self._busy) == self._most or self._is_closed:
            return None
        worker = Worker(self._settings)
        self._answers.register(worker.answers, selectors.EVENT_READ, worker)
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="k3vl-media", daemon=True)
            self._thread.start()
        return worker

    def _read(self) -> None:
        """Take answers for as long as there are workers."""
        while True:
            for key, _ in self._answers.select():
                self._take(key.data)
            with self._lock:
                if not self._answers.get_map():
                    self._thread = None
                    return

    def _take(self, worker: Worker) -> None:
        """What a worker has to say: its part is done, or that it has ended."""
        outcome: ProcessedMedia | BaseException
        try:
            outcome = worker.receive()
        except MediaError as exc:
            outcome = exc
        except BaseException as exc:  # noqa: BLE001 - it is told to whoever waits for the part
            outcome = exc
            worker.kill()  # nobody knows what lies in its pipe
        with self._lock:
            job = self._busy.pop(worker, None)
            if worker.was_killed:
                self._answers.unregister(worker.answers)
                if worker in self._idle:
                    self._idle.remove(worker)
                if self._is_closed:
                    outcome = _closed()
            else:
                self._idle.append(worker)
        if worker.was_killed:
            worker.reap()
        self._hand_out()
        if job is not None:
            job.end(outcome)


def _closed() -> Cancelled:
    return Cancelled("the media workers were ended")
