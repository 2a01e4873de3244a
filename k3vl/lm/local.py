"""The embedded engine behind the backend seam: one thread that owns the model, and a queue.

A dead thread fails every request at once and refuses new ones; nobody waits for it in vain.
"""

from __future__ import annotations

import atexit
import queue
import threading
from itertools import count
from typing import TYPE_CHECKING

import torch

from k3vl.errors import BackendError, Cancelled

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3vl.errors import K3VLError
    from k3vl.lm.backend import Token
    from k3vl.lm.engine import Engine
    from k3vl.lm.stats import EngineStats
    from k3vl.types import Prompt, SamplingParams


class LocalBackend:
    """Runs an :class:`Engine` on its own thread; every method is safe on any thread."""

    def __init__(self, engine: Engine) -> None:
        """Start the thread; from here on only it touches ``engine``."""
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ids = count()
        self._death: BaseException | None = None
        self._closed = threading.Event()
        # Guards the order of "is it alive" and "enqueue", so that no command is left unread.
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="k3vl-engine", daemon=True)
        self._thread.start()
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
        request_id = next(self._ids)
        self._send(lambda: self._engine.add(request_id, prompt, sampling, sink))
        return request_id

    def cancel(self, request_id: int) -> None:
        """See :class:`k3vl.lm.backend.Backend`."""
        try:
            self._send(lambda: self._engine.cancel(request_id))
        except BackendError:
            return  # it has ended already

    def stats(self) -> EngineStats:
        """What the engine holds and has done."""
        return self._engine.stats()

    def holds_features(self, digest: str) -> bool:
        """Whether a media item would not have to be encoded now."""
        return (None, digest) in self._engine.scheduler.features

    def close(self) -> None:
        """Cancel everything and wait for the thread."""
        with self._lock:
            if not self._closed.is_set():
                self._closed.set()
                self._commands.put(None)
        atexit.unregister(self.close)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _send(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self._death is not None:
                raise BackendError(
                    f"the engine stopped after an error ({type(self._death).__name__})"
                ) from self._death
            if self._closed.is_set():
                raise BackendError("the engine is closed")
            self._commands.put(command)

    def _run(self) -> None:
        try:
            if self._engine.config.num_threads is not None:
                torch.set_num_threads(self._engine.config.num_threads)
            while self._obey(wait=not self._engine.jobs):
                self._engine.step()
        except BaseException as exc:  # noqa: BLE001 - whatever it was, callers must hear of it
            self._die(exc)
        else:
            self._engine.fail_all(Cancelled("the engine was closed"))

    def _obey(self, *, wait: bool) -> bool:
        """Carry out commands, waiting for the first when idle; False once closed."""
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait = False

    def _die(self, exc: BaseException) -> None:
        with self._lock:
            self._death = exc
        error = BackendError(f"the engine stopped after an error ({type(exc).__name__}: {exc})")
        error.__cause__ = exc
        while not self._commands.empty():  # requests that were still on their way
            command = self._commands.get()
            if command is not None:
                command()
        self._engine.fail_all(error)
