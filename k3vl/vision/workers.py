"""Media processing for a server: a pool of killable processes behind one coroutine.

``http(s)`` sources are fetched here, on threads, under the fetch policy, so that a slow host holds
no decoder; everything else goes to a worker process as it is. A part that takes too long, or whose
caller has gone, costs its worker: the process is killed and a new one takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from k3vl.errors import CapacityError, MediaError
from k3vl.types import EncoderItem, MediaGroup, MediaLayout, ProcessedMedia
from k3vl.vision.data_uri import check_data_uri
from k3vl.vision.source import Abort, resolve
from k3vl.vision.worker import fetch, read_frame, settings_header, write_frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3vl.types import MediaKind, MediaPart
    from k3vl.vision.processor import MediaProcessor
    from k3vl.vision.worker import MediaForm, SourceForm

MAX_FETCHES = 16
DEFAULT_MEMORY = 4 * 2**30
"""Enough for the largest picture that ``vision.limits`` lets pass, in every mode."""
GIVES_WAY = 5
"""Niceness: decoding gives way to the server's own thread and to an engine in its process, so who
streams keeps streaming. On a busy machine it costs whoever waits for a picture twice the time."""
ABANDONED_SECONDS = 1.0
"""How long a worker may go on for a caller that has left: a new process costs more than most
pictures, and clients that come and go must not be able to make the server start processes."""


class Worker:
    """One process; used by one thread at a time, killed from any."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._file = _unnamed_file()
        shared = None if self._file is None else self._file.fileno()
        self._process = self._start(() if shared is None else (shared,))
        self._settings = {**settings, "file": shared}
        self._kind: MediaKind | None = None  # of the last part
        self.was_killed = False

    def _start(self, files: tuple[int, ...]) -> subprocess.Popen[bytes]:
        """The process; it has these files under the same numbers."""
        return subprocess.Popen(
            [sys.executable, "-m", "k3vl.vision.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=files,
        )

    @property
    def answers(self) -> IO[bytes]:
        """Has something to read when there is an answer, and when the process has ended."""
        assert self._process.stdout is not None
        return self._process.stdout

    def call(self, part: MediaPart, source: str | bytes | Path) -> ProcessedMedia:
        """Process one part; blocks. See :meth:`send` and :meth:`receive`.

        Raises:
            MediaError: the part cannot be used, or the process died of it.
        """
        self.send([(part, source)])
        (outcome,) = self.receive()
        if isinstance(outcome, MediaError):
            raise outcome
        return outcome

    def send(self, parts: Sequence[tuple[MediaPart, str | bytes | Path]]) -> None:
        """Begin with some parts, when those before have been received.

        Blocks for as long as the process reads. One that is dead is told by :meth:`receive`.

        Args:
            parts: each without its source, and that: a URL that needs no network, a file's bytes,
                or a local path.
        """
        heads, blobs = [], []
        for part, source in parts:
            form, blob = _request(source)
            size = len(blob)
            heads.append({"kind": part.kind, "detail": part.detail, "form": form, "size": size})
            blobs.append(blob)
        requests, is_first, self._kind = self._process.stdin, self._kind is None, parts[0][0].kind
        assert requests is not None
        try:
            if is_first:
                write_frame(requests, self._settings)
            write_frame(requests, {"parts": heads}, blobs)
        except BaseException as exc:
            self.kill()  # it is dead, or nobody knows what lies in its pipe
            if not isinstance(exc, Exception):
                raise

    def receive(self) -> list[ProcessedMedia | MediaError]:
        """What has become of each part; blocks.

        Raises:
            MediaError: the process died of one.
        """
        try:
            header, rest = read_frame(self.answers)
            sizes = [reply["size"] for reply in header["parts"]]
            if self._file is not None and header["stored"]:
                blobs = fetch(self._file.fileno(), sizes)
            else:
                ends = list(accumulate(sizes))
                blobs = [
                    memoryview(rest)[end - n : end] for n, end in zip(sizes, ends, strict=True)
                ]
        except (OSError, EOFError, ValueError) as exc:
            self.kill()
            raise MediaError(
                f"{self._kind}: the decoder died of it", code=f"{self._kind}_failed"
            ) from exc
        return [
            MediaError(reply["error"], code=reply["code"])
            if "error" in reply
            else _media(reply, blob)
            for reply, blob in zip(header["parts"], blobs, strict=True)
        ]

    def is_alive(self) -> bool:
        """The process runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process at once, whatever it does."""
        self.was_killed = True
        self._process.kill()

    def reap(self) -> None:
        """Wait for a killed process and close its pipes; blocks."""
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._file):
            with contextlib.suppress(OSError):
                if file is not None:
                    file.close()


def _unnamed_file() -> IO[bytes] | None:
    """Memory that a worker can be given; None where the system has none (macOS, Windows)."""
    if not hasattr(os, "memfd_create"):
        return None
    return open(os.memfd_create("k3vl-patches"), "r+b", buffering=0)


def _scheme(url: str) -> str:
    return url[:64].lstrip().partition(":")[0].lower()


def _request(source: str | bytes | Path) -> tuple[SourceForm, memoryview | str]:
    """How a source goes to a worker; the text of a ``data:`` URL is not copied for it."""
    if isinstance(source, bytes):
        return "bytes", memoryview(source)
    if isinstance(source, Path):
        with contextlib.suppress(FileNotFoundError):  # the directory that this process is in
            source = source.absolute()
        return "path", memoryview(os.fsencode(source))
    if _scheme(source) == "data":
        return "data", source
    return "url", memoryview(source.encode("utf-8", "replace"))


def _take_exception(job: asyncio.Future[Any]) -> None:
    if not job.cancelled():
        job.exception()


def _media(header: dict[str, Any], blob: memoryview) -> ProcessedMedia:
    """Put an answer together; the patches stay where they were read to."""
    layout = header["layout"]
    groups = tuple(MediaGroup(**group) for group in layout["groups"])
    items, offset = [], 0
    for digest, shape, grid, num_tokens in header["items"]:
        size = math.prod(shape)
        patches = np.frombuffer(blob, np.uint8, size, offset).reshape(shape)
        items.append(EncoderItem(digest, patches, tuple(grid), num_tokens))
        offset += size
    urls = []
    for size in header["url_lengths"]:
        urls.append(str(blob[offset : offset + size], "ascii"))
        offset += size
    return ProcessedMedia(
        layout=MediaLayout(layout["kind"], layout["width"], layout["height"], groups),
        items=tuple(items),
        frame_times=tuple(header["frame_times"]),
        warnings=tuple(header["warnings"]),
        urls=tuple(urls),
    )


def num_workers_here() -> int:
    """As many as half of the CPUs that this process may use, from two to eight.

    The pictures of requests that come together should be ready together, so that a server takes
    them in one step; each worker holds some 70 MB.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(2, min(cores // 2, 8))


class MediaWorkers:
    """A pool of worker processes; belongs to one event loop.

    Args:
        processor: whose settings the workers take; its policy also rules the fetches.
        form: what they make.
        num_workers: processes.
        max_seconds: for one part, fetching and waiting not counted.
        max_jobs: parts under way or waiting; more are refused.
        max_memory: bytes that a worker may have written to; what needs more is refused. The system
            enforces it, so nothing that a file makes a decoder do can take the machine with it.
        niceness: of the processes, on top of this one's.
    """

    def __init__(
        self,
        processor: MediaProcessor,
        *,
        form: MediaForm = "patches",
        num_workers: int = 2,
        max_seconds: float = 60.0,
        max_jobs: int = 1024,
        max_memory: int = DEFAULT_MEMORY,
        niceness: int = GIVES_WAY,
    ) -> None:
        self._processor = processor
        policy = processor.policy
        root = policy.file_root if "file" in policy.schemes else None
        self._settings = settings_header(
            processor.config, processor.limits, root, policy.max_bytes, form, max_memory, niceness
        )
        self._max_seconds, self._max_jobs = max_seconds, max_jobs
        self._idle = [Worker(self._settings) for _ in range(num_workers)]
        self._free = asyncio.Semaphore(num_workers)
        self._fetching = asyncio.Semaphore(MAX_FETCHES)
        self._abandoned: set[asyncio.Task[None]] = set()
        self._is_closed = False
        # Threads of killed workers end a moment later than their jobs.
        self._threads = ThreadPoolExecutor(2 * num_workers, thread_name_prefix="k3vl-media")
        self._fetchers = ThreadPoolExecutor(2 * MAX_FETCHES, thread_name_prefix="k3vl-fetch")
        self.num_jobs = 0

    async def process(self, part: MediaPart) -> ProcessedMedia:
        """Fetch, decode and cut one part; cancelling stops the work.

        Raises:
            MediaError: anything that is wrong with the file; ``code`` says what.
            CapacityError: too many parts are waiting.
        """
        if self.num_jobs >= self._max_jobs:
            raise CapacityError(f"{self.num_jobs} media parts are waiting already", retry_after=2.0)
        self.num_jobs += 1
        try:
            source = await self._source(part)
            return await self._work(part, source)
        finally:
            self.num_jobs -= 1

    async def close(self) -> None:
        """Kill all workers; no part may be under way."""
        self._is_closed = True
        for task in self._abandoned:
            task.cancel()
        await asyncio.gather(*self._abandoned, return_exceptions=True)
        for worker in self._idle:
            worker.kill()
            worker.reap()
        self._idle.clear()
        self._threads.shutdown()
        self._fetchers.shutdown(wait=False)

    def kill(self) -> None:
        """End the idle workers at once, from outside of the loop; the pool is no use after it."""
        self._is_closed = True
        for worker in self._idle:
            worker.kill()
            worker.reap()
        self._idle.clear()

    async def _source(self, part: MediaPart) -> str | bytes:
        """What a worker can take: a URL that needs no network, or a file's bytes."""
        source = part.source
        if isinstance(source, bytes):
            return source
        if not isinstance(source, str):
            raise MediaError(f"{part.kind}: a source is a URL or bytes", code="source_invalid")
        scheme = _scheme(source)
        if scheme == "data":  # before it is copied to a worker
            check_data_uri(source, part.kind, self._processor.policy.max_bytes)
        if scheme not in ("http", "https"):
            return source
        abort = Abort()
        async with self._fetching:
            try:
                fetched = await asyncio.get_running_loop().run_in_executor(
                    self._fetchers, resolve, source, part.kind, self._processor.policy, abort
                )
            except asyncio.CancelledError:
                abort()
                raise
        assert isinstance(fetched, bytes)
        return fetched

    async def _work(self, part: MediaPart, source: str | bytes) -> ProcessedMedia:
        """Have a worker do it. An abandoned one may finish what is nearly done, then is killed."""
        loop = asyncio.get_running_loop()
        await self._free.acquire()
        worker = self._idle.pop()
        if not worker.is_alive():  # it died of something else, so this part must not pay for it
            self._threads.submit(worker.reap)
            worker = Worker(self._settings)
        job = loop.run_in_executor(self._threads, worker.call, part, source)
        job.add_done_callback(_take_exception)  # of a job that nobody waits for any more
        try:
            async with asyncio.timeout(self._max_seconds):
                return await asyncio.shield(job)
        except TimeoutError:
            worker.kill()
            raise MediaError(
                f"{part.kind}: not decoded within {self._max_seconds:.0f} seconds",
                code="media_timeout",
            ) from None
        finally:
            if job.done() or worker.was_killed:
                self._put_back(worker)
            else:
                task = loop.create_task(self._abandon(worker, job))
                self._abandoned.add(task)
                task.add_done_callback(self._abandoned.discard)

    async def _abandon(self, worker: Worker, job: asyncio.Future[ProcessedMedia]) -> None:
        try:
            await asyncio.wait([job], timeout=ABANDONED_SECONDS)
        finally:
            if not job.done():
                worker.kill()
            self._put_back(worker)

    def _put_back(self, worker: Worker) -> None:
        if worker.was_killed:
            self._threads.submit(worker.reap)
            if not self._is_closed:
                worker = Worker(self._settings)
        self._idle.append(worker)
        self._free.release()
