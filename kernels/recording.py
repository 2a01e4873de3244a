"""Steps that are done again and again over the same memory: recorded once, then replayed.

Where a step's launches cost the host more than they compute. Who calls it fills the step's inputs
and knows when nobody reads its result any more.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, TypeAlias
from weakref import WeakSet

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

Step: TypeAlias = "Callable[[], torch.Tensor]"
"""Work whose inputs lie in the same memory each time."""


class Runner(Protocol):
    """Makes steps ready to be repeated."""

    def make(self, step: Step) -> Step:
        """What does the same as ``step`` each time it is called; its result stays where it is.

        Called while the inputs are padding: it may do ``step`` any number of times. Steps of one
        runner take turns on one stream: the result of one may be gone when another has run.
        """


class EagerRunner:
    """Repeats a step by doing it again, into the same memory."""

    def make(self, step: Step) -> Step:
        """See :class:`Runner`."""
        out = step()

        @torch.inference_mode()
        def again() -> torch.Tensor:
            return out.copy_(step())

        return again


class GraphRunner:
    """Records a step as a CUDA graph; all graphs share one pool of memory, and a stream.

    The stream is no other's (:class:`OwnStream`): cuBLAS has a workspace for every stream that it
    is recorded on, and graphs of two runners, such as the tower's and decoding's, are replayed side
    by side.

    Recorded when first wanted and not at start: every size costs seconds of compiling and capturing
    a whole model, and one caption needs one of them.
    """

    def __init__(self) -> None:
        """An empty pool."""
        self._pool = torch.cuda.graph_pool_handle()
        self._own = OwnStream()

    def make(self, step: Step) -> Step:
        """See :class:`Runner`; replays go where the caller is then, in its stream's order."""
        current, stream = torch.cuda.current_stream(), self._own.stream
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            step()  # compiles kernels and loads libraries, which cannot be recorded
        current.wait_stream(stream)
        graph, origin = torch.cuda.CUDAGraph(), _origin(current.device).stream
        # The encoder's thread may allocate meanwhile: that is none of this capture's business. The
        # outer stream is there for a capture that fails, after which torch leaves its own current.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(
                graph, pool=self._pool, stream=origin, capture_error_mode="thread_local"
            ),
        ):
            # A graph that goes frees cuBLAS' workspace of the stream that its capture began on
            # (torch from 2.12 on), whoever else has it in a graph. On the origin there is none.
            stream.wait_stream(origin)
            try:
                with torch.cuda.stream(stream):
                    out = step()
            finally:
                origin.wait_stream(stream)

        return _Replay(graph, step, out)


_POOL = 32
"""Streams that torch has of a device; it hands them out in turn, those in use among them."""


class OwnStream:
    """A stream that is nobody else's who got one here, for as long as this is held.

    ``torch.cuda.Stream()`` may be one that somebody has: a trainer that renews weights a few dozen
    times would have the tower recorded where decoding is. Who holds what is known by weak
    references to this and not to the stream: those to torch's outlive it.

    Attributes:
        stream: the stream.
    """

    __slots__ = ("__weakref__", "stream")

    stream: torch.cuda.Stream

    def __init__(self, device: torch.device | None = None) -> None:
        """Take one.

        Raises:
            RuntimeError: all are held.
        """
        for collected in (False, True):
            if collected:
                gc.collect()  # what holds graphs is held by them now and then
            held = {(own.stream.device, own.stream.cuda_stream) for own in _owned}
            for _ in range(_POOL):
                self.stream = torch.cuda.Stream(device)
                if (self.stream.device, self.stream.cuda_stream) not in held:
                    _owned.add(self)
                    return
        raise RuntimeError(f"all {_POOL} streams of the device are in use")


_owned: WeakSet[OwnStream] = WeakSet()
"""Of the process, as torch's streams are."""


@lru_cache
def _origin(device: torch.device) -> OwnStream:
    """Where captures begin; nothing runs there."""
    return OwnStream(device)


@dataclass(frozen=True, slots=True)
class _Replay:
    """A recorded step.

    A graph knows addresses. Who made ``step`` may be gone, so its inputs are kept alive by it.
    """

    graph: torch.cuda.CUDAGraph
    step: Step
    out: torch.Tensor

    def __call__(self) -> torch.Tensor:
        """Do it again, in the current stream."""
        self.graph.replay()
        return self.out
