"""The embedded engine behind the backend seam: one thread that owns the model, and a queue.

A dead engine fails every request at once and refuses new ones; nobody waits for it in vain.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

import torch

from k3vl.errors import BackendError, Cancelled, RequestError
from k3vl.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from k3vl.errors import K3VLError
    from k3vl.lm.backend import Encoder, InFlight, ScoreMethod, Token
    from k3vl.lm.engine import Engine
    from k3vl.lm.model import K3Model
    from k3vl.lm.stats import EngineStats
    from k3vl.types import Prompt

    Sink: TypeAlias = Callable[[Token | K3VLError], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """Weights that wait for the requests before them to end."""

    model: K3Model
    encoder: Encoder
    done: Future[None] = field(default_factory=Future)


class LocalBackend:
    """Runs an :class:`Engine` on its own thread; every method is safe on any thread."""

    def __init__(self, engine: Engine) -> None:
        """Start the thread; from here on only that thread touches ``engine``."""
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ids = count()
        # Both are the thread's: weights that wait, and requests that wait for them.
        self._updates: list[_Update] = []
        self._held: dict[int, tuple[Callable[[], None], Sink]] = {}
        self._death: BaseException | None = None
        self._closed = threading.Event()
        # Guards the order of "is it alive" and "enqueue", so that no command is left unread; and
        # what follows.
        self._lock = threading.Lock()
        self._idle_since: float | None = time.perf_counter()
        self._idle_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="k3vl-engine", daemon=True)
        self._thread.start()
        # A daemon thread that still runs native code while Python shuts down aborts the process.
        atexit.register(self.close)

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        sink: Sink,
    ) -> int:
        """See :class:`k3vl.lm.backend.Backend`."""
        request_id = next(self._ids)
        job = self._engine.job(request_id, prompt, sampling, sink)
        self._enter(request_id, partial(self._engine.queue, job), sink)
        return request_id

    def score(
        self,
        prompt: Prompt,
        token_ids: Sequence[int],
        sink: Sink,
        *,
        method: ScoreMethod = "prefill",
    ) -> int:
        """Ask how likely an answer is.

        Args:
            prompt: what the answer follows.
            token_ids: the answer.
            sink: as of :meth:`submit`; gets every token of the answer with its log-probability.
            method: ``prefill`` runs the answer as if it belonged to the prompt, page by page: fast,
                and to the last bit the same in any company, but not the bits of decoding.
                ``decode`` runs it token by token: as slow as generating it, and to the last bit
                what generating reports (with ``exact_decode``; without, while nothing else
                decodes).

        Returns:
            The request's number.

        Raises:
            RequestError: the answer is empty, not of the vocabulary, or longer than the context.
            CapacityError: it can never fit into the cache.
            BackendError: the engine is dead.
        """
        if not token_ids:
            raise RequestError("there are no tokens to score", param="token_ids")
        self._engine.check_tokens(token_ids)
        room = self._engine.admissible(prompt, SamplingParams(max_tokens=len(token_ids)))
        if room < len(token_ids):
            raise RequestError(
                f"{len(token_ids)} tokens to score, the context has room for {room}",
                param="token_ids",
                code="context_length_exceeded",
            )
        request_id = next(self._ids)
        add = self._engine.add_scored if method == "prefill" else self._engine.add_forced
        self._enter(request_id, partial(add, request_id, prompt, token_ids, sink), sink)
        return request_id

    def update(self, model: K3Model, encoder: Encoder, *, in_flight: InFlight = "finish") -> None:
        """Go on with other weights; returns when they are in use.

        They come between two steps, when no request is left that began with the old ones. A request
        never sees both. What comes after this call waits for the new weights. Prefixes, checkpoints
        and media features of the old ones are dropped.

        Args:
            model: of the same configuration, dtype and device as the running one.
            encoder: likewise.
            in_flight: let requests that are in the engine ``finish``, or ``cancel`` them.

        Raises:
            BackendError: the engine is dead, or dies before it is done.
            Cancelled: the engine is closed before it is done.
        """
        update = _Update(model=model, encoder=encoder)
        with self._lock:
            self._send(partial(self._announce, update, in_flight))
        update.done.result()

    def cancel(self, request_id: int) -> None:
        """See :class:`k3vl.lm.backend.Backend`."""
        with self._lock:
            if self._death is None and not self._closed.is_set():  # or it has ended already
                self._send(partial(self._cancel, request_id))

    def stats(self) -> EngineStats:
        """What the engine holds and has done."""
        with self._lock:
            since, now = self._idle_since, time.perf_counter()
            idle = self._idle_seconds + (0.0 if since is None else now - since)
        return replace(self._engine.stats(), idle_seconds=idle)

    def holds_features(self, digest: str) -> bool:
        """Whether a media item would not have to be encoded now."""
        return (None, digest) in self._engine.scheduler.features

    def close(self) -> None:
        """Cancel everything and wait for the thread."""
        with self._lock:
            if not self._closed.is_set():
                self._closed.set()
                self._commands.put(None)
                self._engine.wake()
        atexit.unregister(self.close)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _enter(self, request_id: int, start: Callable[[], None], sink: Sink) -> None:
        with self._lock:
            self._send(partial(self._start, request_id, start, sink))
            if self._idle_since is not None:
                self._idle_seconds += time.perf_counter() - self._idle_since
                self._idle_since = None

    def _send(self, command: Callable[[], None]) -> None:
        """Hand the thread a command; the lock is held."""
        self._check_alive()
        self._commands.put(command)
        self._engine.wake()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise BackendError(
                f"the engine stopped after an error ({type(self._death).__name__})"
            ) from self._death
        if self._closed.is_set():
            raise BackendError("the engine is closed")

    # ------------------------------------------------------------------ on the engine's thread

    def _run(self) -> None:
        try:
            if self._engine.config.num_threads is not None:
                torch.set_num_threads(self._engine.config.num_threads)
            while self._obey(wait=not self._engine.jobs):
                self._engine.step()
                self._apply_updates()
        except BaseException as exc:  # noqa: BLE001 - whatever it was, callers must hear of it
            self._die(exc)
        else:
            self._fail_all(Cancelled("the engine was closed"))
        self._engine.close()

    def _start(self, request_id: int, start: Callable[[], None], sink: Sink) -> None:
        """Add a request, or keep it for the weights that are about to come."""
        if self._updates:
            self._held[request_id] = (start, sink)
        else:
            start()

    def _cancel(self, request_id: int) -> None:
        if (held := self._held.pop(request_id, None)) is not None:
            held[1](Cancelled("the request was cancelled"))
        else:
            self._engine.cancel(request_id)

    def _announce(self, update: _Update, in_flight: InFlight) -> None:
        self._updates.append(update)
        if in_flight == "cancel":
            self._engine.fail_all(Cancelled("the weights are being updated"))

    def _apply_updates(self) -> None:
        """Bring in the weights that wait, once the last request before them has ended."""
        if not self._updates or self._engine.jobs:
            return
        while self._updates:  # one leaves the list when it is done: if this dies, _fail_all ends it
            self._engine.update(self._updates[0].model, self._updates[0].encoder)
            self._updates.pop(0).done.set_result(None)
        while self._held:
            start, _ = self._held.pop(next(iter(self._held)))
            start()

    def _fail_all(self, error: K3VLError) -> None:
        """End everything that runs or waits."""
        self._engine.fail_all(error)
        for _, sink in self._held.values():
            sink(error)
        for update in self._updates:
            update.done.set_exception(error)
        self._held, self._updates = {}, []

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
            if self._idle_since is None and self._commands.empty():
                self._idle_since = time.perf_counter()

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
