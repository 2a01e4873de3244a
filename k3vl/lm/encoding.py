"""Media features made beside the language model: who encodes, and when their rows are there.

The engine starts what the scheduler has chosen and takes what is done. In the step itself (the
simplest, and what one core wants), on a thread of its own while the engine decodes on another core,
or on a CUDA stream of its own. This changes when rows are made and never which.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from k3vl.errors import BackendError
from k3vl.kernels.recording import OwnStream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k3vl.lm.backend import Encoder
    from k3vl.lm.features import Feature
    from k3vl.types import EncoderItem

    Wanted: TypeAlias = tuple[Feature, EncoderItem]
    Made: TypeAlias = tuple[Feature, torch.Tensor | BackendError]


class Encoding(Protocol):
    """Makes encoder outputs for an engine, whose thread alone calls it, but for :meth:`wake`.

    Attributes:
        beside: outputs may come in a later step than the one that started them.
        seconds: spent encoding so far, on whatever encodes.
    """

    beside: bool
    seconds: float

    def start(self, wanted: Sequence[Wanted]) -> None:
        """Have outputs made, in this order; one that nobody holds any more may be left out."""

    def take(self, *, wait: bool) -> list[Made]:
        """Rows [num_tokens, D] of what is done, or the error of an item that cannot be encoded.

        Args:
            wait: for one at least, where any is under way; :meth:`wake` ends that too.
        """

    def wake(self) -> None:
        """End a :meth:`take` that waits, or the next that would; safe on any thread."""

    def renew(self, encoder: Encoder) -> None:
        """Go on with other weights; of what the old ones make nothing is handed out.

        Nobody may hold an output that is under way.
        """

    def close(self) -> None:
        """End what makes them; nobody may hold an output that is under way."""


class EncodeInStep:
    """Encodes on the engine's thread: what a step starts is there in the same step."""

    beside = False

    def __init__(self, encoder: Encoder) -> None:
        self.seconds = 0.0
        self.encoder = encoder
        self._made: list[Made] = []

    def start(self, wanted: Sequence[Wanted]) -> None:
        """See :class:`Encoding`."""
        begin = time.perf_counter()
        self._made += encode_each(self.encoder, wanted)
        self.seconds += time.perf_counter() - begin

    def take(self, *, wait: bool) -> list[Made]:
        """See :class:`Encoding`."""
        made, self._made = self._made, []
        return made

    def wake(self) -> None:
        """Nobody waits."""

    def renew(self, encoder: Encoder) -> None:
        """See :class:`Encoding`."""
        self.encoder = encoder

    def close(self) -> None:
        """Nothing runs."""


class EncodeOnThread:
    """Encodes one item after the other on a thread, while the engine's runs on another core.

    Where the engine would only wait, it takes items from the queue itself: what comes in meanwhile
    waits for one at most.

    Args:
        encoder: two threads call it, each for other items.
        num_threads: CPU threads of one operation of that thread; None leaves it to torch.
    """

    beside = True

    def __init__(self, encoder: Encoder, *, num_threads: int | None = None) -> None:
        self.seconds = 0.0
        self.encoder = encoder
        self._num_threads = num_threads
        self._under_way = 0
        self._called = False
        # What an encoder does at its first call, to tables or compiled code, one thread does.
        self._has_run = False
        self._wanted: queue.SimpleQueue[Wanted | None] = queue.SimpleQueue()
        # Seconds and a list for every item, empty where nobody held it by then; None: wake().
        self._made: queue.SimpleQueue[tuple[float, list[Made]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="k3vl-encoder", daemon=True)
        self._thread.start()

    def start(self, wanted: Sequence[Wanted]) -> None:
        """See :class:`Encoding`."""
        self._under_way += len(wanted)
        for each in wanted:
            self._wanted.put(each)

    def take(self, *, wait: bool) -> list[Made]:
        """See :class:`Encoding`."""
        made = self._collect(block=False)
        if not wait:
            return made
        if self._under_way and not made and not self._called:
            made = self._collect(block=not self._help())
        self._called = False
        return made

    def wake(self) -> None:
        """See :class:`Encoding`."""
        self._made.put(None)

    def renew(self, encoder: Encoder) -> None:
        """See :class:`Encoding`; waits for the item that is being encoded."""
        while self._under_way:
            self.take(wait=True)
        self.encoder, self._has_run = encoder, False

    def close(self) -> None:
        """See :class:`Encoding`; waits for the item that is being encoded."""
        self._wanted.put(None)
        self._thread.join()

    def _collect(self, *, block: bool) -> list[Made]:
        """All that is done; with ``block``, once there is any or somebody calls."""
        collected: list[Made] = []
        while True:
            try:
                done = self._made.get(block=block)
            except queue.Empty:
                return collected
            block = False
            if done is None:
                self._called = True
                continue
            seconds, made = done
            self._under_way -= 1
            self._has_run |= bool(made)
            self.seconds += seconds
            collected += made

    def _help(self) -> bool:
        """Encode an item on the engine's thread, if that leaves one for the other."""
        if self._under_way < 2 or not self._has_run:
            return False
        try:
            each = self._wanted.get(block=False)
        except queue.Empty:
            return False
        assert each is not None, "this thread alone closes"
        self._encode(each)
        return True

    def _encode(self, each: Wanted) -> None:
        begin = time.perf_counter()
        held = each[0].entry.kept  # or its users have left
        made = list(encode_each(self.encoder, [each])) if held else []
        self._made.put((time.perf_counter() - begin, made))

    def _run(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        while (each := self._wanted.get()) is not None:
            self._encode(each)


class EncodeOnStream:
    """Encodes in one batch on a CUDA stream of its own; not measured yet.

    The engine's thread launches, the work goes on beside the engine's own stream. It is that stream
    which waits for rows, on the device: the host never does. An encoder that replays recorded
    passes copies rows out of their memory on this stream, so the next replay comes behind.

    Args:
        encoder: of models on the current CUDA device.
    """

    beside = True

    def __init__(self, encoder: Encoder) -> None:
        self.seconds = 0.0
        self._own = OwnStream()
        self._stream = self._own.stream
        self._launched: deque[tuple[list[Made], torch.cuda.Event, torch.cuda.Event]] = deque()
        self._untimed: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self.renew(encoder)

    def start(self, wanted: Sequence[Wanted]) -> None:
        """See :class:`Encoding`."""
        if not wanted:
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            begin.record()
            made = list(encode_each(self.encoder, wanted))
            end.record()
        self._launched.append((made, begin, end))

    def take(self, *, wait: bool) -> list[Made]:
        """See :class:`Encoding`; with ``wait`` rows may still be on their way, on the device."""
        taken: list[Made] = []
        while self._launched and (wait or self._launched[0][2].query()):
            made, begin, end = self._launched.popleft()
            stream = torch.cuda.current_stream()
            stream.wait_event(end)
            # Or its memory may be written again before; that of a batch is one.
            tensors = (rows for _, rows in made if isinstance(rows, torch.Tensor))
            for rows in {rows.untyped_storage().data_ptr(): rows for rows in tensors}.values():
                rows.record_stream(stream)
            taken += made
            self._untimed.append((begin, end))
            wait = False
        while self._untimed and self._untimed[0][1].query():
            begin, end = self._untimed.popleft()
            self.seconds += begin.elapsed_time(end) / 1000
        return taken

    def wake(self) -> None:
        """Nobody waits."""

    def renew(self, encoder: Encoder) -> None:
        """See :class:`Encoding`."""
        self._launched.clear()
        stream = torch.cuda.current_stream()
        # The old weights are still read here: their memory is the engine's stream's to use again.
        stream.wait_stream(self._stream)
        self.encoder = encoder
        # What is being written there: the new ones.
        self._stream.wait_stream(stream)

    def close(self) -> None:
        """See :class:`Encoding`."""
        self._stream.synchronize()


def encode_each(encoder: Encoder, wanted: Sequence[Wanted]) -> Iterator[Made]:
    """Rows of every output; when the joint call fails, each is tried alone."""
    try:
        encoded = encoder.encode([item for _, item in wanted]) if wanted else []
    except Exception as exc:  # noqa: BLE001 - one request's media must not end the others
        if len(wanted) == 1:
            error = BackendError(f"the vision tower failed ({type(exc).__name__})")
            error.__cause__ = exc
            yield wanted[0][0], error
            return
        for each in wanted:
            yield from encode_each(encoder, [each])
    else:
        for (feature, _), rows in zip(wanted, encoded, strict=True):
            yield feature, rows
