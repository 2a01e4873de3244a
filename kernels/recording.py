"""Steps that are done again and again over the same memory: recorded once, then replayed.

Where a step's launches cost the host more than they compute. Who calls it fills the step's inputs
and knows when nobody reads its result any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

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

    The stream is no other runner's: cuBLAS has a workspace for every stream that it is recorded on,
    and graphs of two runners, such as the tower's and decoding's, are replayed side by side.

    Recorded when first wanted and not at start: every size costs seconds of compiling and capturing
    a whole model, and one caption needs one of them.
    """

    def __init__(self) -> None:
        """An empty pool."""
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def make(self, step: Step) -> Step:
        """See :class:`Runner`; replays go where the caller is then, in its stream's order."""
        current, stream = torch.cuda.current_stream(), self._stream
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            step()  # compiles kernels and loads libraries, which cannot be recorded
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # The encoder's thread may allocate meanwhile: that is none of this capture's business. The
        # outer stream is there for a capture that fails, after which torch leaves its own current.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(
                graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
            ),
        ):
            out = step()

        return _Replay(graph, step, out)


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
