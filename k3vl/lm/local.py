"""The embedded engine behind the backend seam: one thread that owns the model, and a queue.

A second thread may encode media ahead of it (``ahead.py``). A dead engine fails every request at
once and refuses new ones; nobody waits for it in vain.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import torch

from k3vl.errors import BackendError, Cancelled

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3vl.errors import K3VLError
    from k3vl.lm.ahead import EncodeAhead
    from k3vl.lm.backend import Token
    from k3vl.lm.engine import Engine
    from k3vl.lm.stats import EngineStats
    from k3vl.types import Prompt, SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class _Submitted:
    """A request on its way into the engine."""

    id: int
    prompt: Prompt
    sampling: SamplingParams
    sink: Callable[[Token | K3VLError], None]
    arrived: float


class LocalBackend:
    """Runs an :class:`Engine` on its own thread; every method is safe on any thread."""

    def __init__(self, engine: Engine, *, ahead: EncodeAhead | None = None) -> None:
        """Start the threads; from here on only the first of them touches ``engine``.

        Args:
            engine: not used by anybody else.
            ahead: the engine's encoder, where media are to be encoded on a thread of their own.
        """
        self._engine = engine
        self._ahead = ahead
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ids = count()
        self._death: BaseException | None = None
        self._closed = threading.Event()
        # Guards the order of "is it alive" and "enqueue", so that no command is left unread; and
        # what follows.
        self._lock = threading.Lock()
        self._encoding: dict[int, _Submitted] = {}
        self._to_encode: queue.SimpleQueue[_Submitted | None] = queue.SimpleQueue()
        self._idle_since: float | None = time.perf_counter()
        self._idle_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="k3vl-engine", daemon=True)
        self._threads = [self._thread]
        if ahead is not None:
            self._threads.append(
                threading.Thread(
                    target=self._encode, args=(ahead,), name="k3vl-encoder", daemon=True
                )
            )
        for thread in self._threads:
            thread.start()
        # A daemon thread that still runs native code while Python shuts down aborts the process.
        atexit.register(self.close)

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        sink: Callable[[Token | K3VLError], None],
    ) -> int:
        """See :class:`k3vl.lm.backend.Backend`."""
        self._engine.admissible(prompt, sampling)
        request = _Submitted(next(self._ids), prompt, sampling, sink, time.perf_counter())
        with self._lock:
            self._check_alive()
            if self._idle_since is not None:
                self._idle_seconds += time.perf_counter() - self._idle_since
                self._idle_since = None
            if self._ahead is not None and prompt.spans:
                self._encoding[request.id] = request
                self._to_encode.put(request)
            else:
                self._commands.put(partial(self._add, request))
        return request.id

    def cancel(self, request_id: int) -> None:
        """See :class:`k3vl.lm.backend.Backend`."""
        with self._lock:
            if self._is_over():
                return  # it has ended already
            request = self._encoding.pop(request_id, None)
            if request is None:
                self._commands.put(partial(self._engine.cancel, request_id))
            else:
                error = Cancelled("the request was cancelled")
                self._commands.put(partial(request.sink, error))

    def stats(self) -> EngineStats:
        """What the engine holds and has done."""
        stats = self._engine.stats()
        with self._lock:
            since, now = self._idle_since, time.perf_counter()
            idle = self._idle_seconds + (0.0 if since is None else now - since)
            waiting = stats.waiting + len(self._encoding)
        seconds = dict(stats.stage_seconds)
        if self._ahead is not None:
            seconds["encode"] += self._ahead.seconds
        return replace(stats, waiting=waiting, stage_seconds=seconds, idle_seconds=idle)

    def holds_features(self, digest: str) -> bool:
        """Whether a media item would not have to be encoded now."""
        return (None, digest) in self._engine.scheduler.features

    def close(self) -> None:
        """Cancel everything and wait for the threads."""
        with self._lock:
            if not self._closed.is_set():
                self._closed.set()
                self._commands.put(None)
                self._to_encode.put(None)
        atexit.unregister(self.close)
        for thread in self._threads:
            if threading.current_thread() is not thread:
                thread.join()

    def _is_over(self) -> bool:
        return self._death is not None or self._closed.is_set()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise BackendError(
                f"the engine stopped after an error ({type(self._death).__name__})"
            ) from self._death
        if self._closed.is_set():
            raise BackendError("the engine is closed")

    # ------------------------------------------------------------------ the encoder's thread

    def _encode(self, ahead: EncodeAhead) -> None:
        """Encode the media of requests in their order, then pass them on."""
        self._set_num_threads()
        features = self._engine.scheduler.features
        while (request := self._to_encode.get()) is not None:
            salt = request.sampling.cache_salt
            for span in request.prompt.spans:
                if request.id not in self._encoding or self._closed.is_set():
                    break  # it was cancelled
                if (salt, span.item.digest) not in features:
                    try:
                        ahead.prepare(span.item, salt)
                    except Exception:  # noqa: BLE001 - the engine meets it again, and tells
                        break
            with self._lock:
                # At the end those that are still here hear of it from the engine's thread.
                if not self._is_over() and self._encoding.pop(request.id, None) is not None:
                    self._commands.put(partial(self._add, request))

    # ------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        try:
            self._set_num_threads()
            while self._obey(wait=not self._engine.jobs):
                self._engine.step()
        except BaseException as exc:  # noqa: BLE001 - whatever it was, callers must hear of it
            self._die(exc)
        else:
            self._fail_all(Cancelled("the engine was closed"))

    def _set_num_threads(self) -> None:
        if self._engine.config.num_threads is not None:
            torch.set_num_threads(self._engine.config.num_threads)

    def _obey(self, *, wait: bool) -> bool:
        """Carry out commands, waiting for the first when idle; False once closed."""
        if wait:
            self._note_idle()
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait = False

    def _note_idle(self) -> None:
        """From here until the next request nobody has anything for the engine to do."""
        with self._lock:
            if self._idle_since is None and not self._encoding and self._commands.empty():
                self._idle_since = time.perf_counter()

    def _add(self, request: _Submitted) -> None:
        self._engine.add(
            request.id, request.prompt, request.sampling, request.sink, arrived=request.arrived
        )

    def _die(self, exc: BaseException) -> None:
        with self._lock:
            self._death = exc
        error = BackendError(f"the engine stopped after an error ({type(exc).__name__}: {exc})")
        error.__cause__ = exc
        while not self._commands.empty():  # requests that were still on their way
            command = self._commands.get()
            if command is not None:
                command()
        self._fail_all(error)

    def _fail_all(self, error: K3VLError) -> None:
        """End every request, those that are being encoded too."""
        self._engine.fail_all(error)
        with self._lock:
            left = list(self._encoding.values())
            self._encoding.clear()
        for request in left:
            request.sink(error)
