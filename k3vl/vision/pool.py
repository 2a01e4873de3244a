"""A processor whose decoding other processes do, so that Python's lock here is the engine's.

Files are found, fetched and refused here, by the rules of :class:`MediaProcessor`; bytes go to a
worker (``worker.py``) and patches come back. One thread writes to all workers and reads what they
answer, several pictures at a time where there are more than workers: every call of the system gives
the lock away and takes it back from the engine's thread. The server has a pool of its own, with
deadlines, on its event loop (``workers.py``).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
from collections import deque
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from k3vl.errors import Cancelled
from k3vl.types import MediaPart
from k3vl.vision.limits import DEFAULT_LIMITS, MediaLimits
from k3vl.vision.processor import MediaProcessor
from k3vl.vision.source import DEFAULT_POLICY, FetchPolicy, resolve
from k3vl.vision.worker import settings_header
from k3vl.vision.workers import DEFAULT_MEMORY, GIVES_WAY, Worker, num_workers_here

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3vl.config import MediaConfig
    from k3vl.types import Detail, ProcessedMedia


MOST_TOGETHER = 4
"""Pictures that a worker is given at once."""
LARGE = 1 << 20
"""Bytes of a file that goes alone."""


@dataclass(slots=True, eq=False)
class _Job:
    """A part on its way through a worker; ``alone`` if it may have been the death of one."""

    part: MediaPart
    source: bytes | Path
    future: Future[ProcessedMedia] = field(default_factory=Future)
    alone: bool = False

    @property
    def is_small(self) -> bool:
        is_long = isinstance(self.source, bytes) and len(self.source) > LARGE
        return self.part.kind == "image" and not self.alone and not is_long

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
        self._busy: dict[Worker, list[_Job]] = {}
        self._waiting: deque[_Job] = deque()
        self._thread: threading.Thread | None = None
        self._is_rung = self._is_closed = False
        self._selector = selectors.DefaultSelector()  # the thread's: answers, and a bell
        self._ring: socket.socket | None = None

    def close(self) -> None:
        """End the workers; parts that are under way fail."""
        with self._lock:
            self._is_closed = True
            for worker in (*self._idle, *self._busy):  # the thread reaps them
                worker.kill()
            waiting, thread = list(self._waiting), self._thread
            self._waiting.clear()
            self._wake()
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

    def _enter(self, job: _Job) -> Future[ProcessedMedia]:
        """Have a worker do it."""
        with self._lock:
            if self._is_closed:
                raise _closed()
            self._waiting.append(job)
            if self._thread is None:
                self._ring, bell = socket.socketpair()
                self._selector.register(bell, selectors.EVENT_READ)
                self._thread = threading.Thread(
                    target=self._run, args=(bell,), name="k3vl-media", daemon=True
                )
                self._thread.start()
            self._wake()
        return job.future

    def _wake(self) -> None:
        """Have the thread look at what is there; the lock is held."""
        if self._ring is not None and not self._is_rung:
            self._is_rung = True
            self._ring.send(b"!")

    # ------------------------------------------------------------------ on the thread

    def _run(self, bell: socket.socket) -> None:
        """Until the pool is closed and the last worker reaped."""
        while not self._is_closed or len(self._selector.get_map()) > 1:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._take(key.data)
                    continue
                bell.recv(1)
                with self._lock:
                    self._is_rung = False
            self._hand_out()
        with self._lock:
            assert self._ring is not None
            self._ring.close()
            self._ring = None
        bell.close()
        self._selector.close()

    def _hand_out(self) -> None:
        """Give parts that wait to idle workers."""
        while True:
            with self._lock:
                jobs, worker, error = self._next()
                if worker is not None:
                    self._busy[worker] = jobs
            if worker is not None:
                worker.send([(job.part, job.source) for job in jobs])
            elif error is not None:
                jobs[0].end(error)
            else:
                return

    def _next(self) -> tuple[list[_Job], Worker | None, Exception | None]:
        """Parts, and who does them or why nobody can; the lock is held.

        As many small ones as are each worker's share of all that wait.
        """
        while self._waiting and self._waiting[0].future.cancelled():
            self._waiting.popleft()
        share = -(-len(self._waiting) // max(1, self._most - len(self._busy)))
        try:
            worker = self._find_worker() if self._waiting else None
        except Exception as exc:  # noqa: BLE001 - the system has no process or memory for one
            return [self._waiting.popleft()], None, exc
        if worker is None:
            return [], None, None
        jobs = [self._waiting.popleft()]
        while self._waiting and len(jobs) < min(share, MOST_TOGETHER):
            if not (jobs[0].is_small and self._waiting[0].is_small):
                break
            jobs.append(self._waiting.popleft())
        return jobs, worker, None

    def _find_worker(self) -> Worker | None:
        """One that is idle, or new; the lock is held."""
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive():  # or it died of something else, for which no part must pay
                return worker
        if len(self._busy) == self._most or self._is_closed:
            return None
        worker = Worker(self._settings)
        self._selector.register(worker.answers, selectors.EVENT_READ, worker)
        return worker

    def _take(self, worker: Worker) -> None:
        """What a worker has to say: its parts are done, or that it has ended."""
        outcomes: Sequence[ProcessedMedia | BaseException] | BaseException
        try:
            outcomes = worker.receive()
        except BaseException as exc:  # noqa: BLE001 - it is told to whoever waits for the part
            outcomes = exc
            worker.kill()  # nobody knows what lies in its pipe
        with self._lock:
            jobs = self._busy.pop(worker, [])
            if not worker.was_killed:
                self._idle.append(worker)
            elif worker in self._idle:
                self._idle.remove(worker)
            if self._is_closed and isinstance(outcomes, BaseException):
                outcomes = _closed()
            elif isinstance(outcomes, BaseException) and len(jobs) > 1:  # it was one of them
                for job in reversed(jobs):
                    job.alone = True
                    self._waiting.appendleft(job)
                jobs = []
        if worker.was_killed:
            self._selector.unregister(worker.answers)
            worker.reap()
        self._hand_out()
        if isinstance(outcomes, BaseException):
            outcomes = [outcomes] * len(jobs)
        for job, outcome in zip(jobs, outcomes, strict=True):
            job.end(outcome)


def _closed() -> Cancelled:
    return Cancelled("the media workers were ended")
