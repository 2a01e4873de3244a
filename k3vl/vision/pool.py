"""A processor whose decoding other processes do, so that Python's lock here is the engine's.

Files are found, fetched and refused here, by the rules of :class:`MediaProcessor`; bytes go to a
worker (``worker.py``) and patches come back. A thread that waits for a worker holds no lock. The
server has a pool of its own, with deadlines, on its event loop (``workers.py``).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from PIL import Image

from k3vl.errors import Cancelled, MediaError
from k3vl.types import MediaPart
from k3vl.vision.limits import DEFAULT_LIMITS, MediaLimits
from k3vl.vision.processor import MediaProcessor
from k3vl.vision.source import DEFAULT_POLICY, FetchPolicy
from k3vl.vision.worker import settings_header
from k3vl.vision.workers import DEFAULT_MEMORY, GIVES_WAY, Worker, num_workers_here

if TYPE_CHECKING:
    from pathlib import Path

    from k3vl.config import MediaConfig
    from k3vl.types import Detail, ProcessedMedia


class PooledProcessor(MediaProcessor):
    """As its base, with bytes and paths decoded elsewhere; a PIL image is here already.

    A worker is started when a part finds none that is idle, and ends when the pool is closed or
    this process has ended, in whatever way.

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
        self._free = threading.Semaphore(num_workers or num_workers_here())
        self._lock = threading.Lock()
        # The lock guards what follows.
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self._is_closed = False

    def close(self) -> None:
        """End the workers; parts that are under way fail."""
        with self._lock:
            self._is_closed = True
            for worker in self._busy:  # whose threads reap them
                worker.kill()
            while self._idle:
                worker = self._idle.pop()
                worker.kill()
                worker.reap()

    def _process_image(
        self, source: bytes | Path | Image.Image, detail: Detail | None
    ) -> ProcessedMedia:
        if isinstance(source, Image.Image):
            return super()._process_image(source, detail)
        return self._work(MediaPart("image", b"", detail), source)

    def _process_video(self, source: bytes | Path) -> ProcessedMedia:
        return self._work(MediaPart("video", b""), source)

    def _work(self, part: MediaPart, source: bytes | Path) -> ProcessedMedia:
        """Have a worker do it; waits for one."""
        with self._free:
            worker = self._borrow()
            try:
                return worker.call(part, source)
            except MediaError:
                self._check_open()
                raise
            except BaseException:
                worker.kill()  # nobody knows what lies in its pipes
                raise
            finally:
                self._give_back(worker)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Cancelled("the media workers were ended")

    def _borrow(self) -> Worker:
        with self._lock:
            self._check_open()
            worker = self._idle.pop() if self._idle else Worker(self._settings)
            if not worker.is_alive():  # it died of something else: this part must not pay for it
                worker.reap()
                worker = Worker(self._settings)
            self._busy.add(worker)
        return worker

    def _give_back(self, worker: Worker) -> None:
        with self._lock:
            self._busy.remove(worker)
            if not worker.was_killed:
                self._idle.append(worker)
                return
        worker.reap()
