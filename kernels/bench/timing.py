"""How long work takes on a CUDA device, and what the device can do at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_L2_TIMES_FOUR = 256 << 20
_AHEAD = 5_000_000
"""Clock cycles, under 3 ms: more than Python needs to queue a dozen launches of another library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Microseconds of one call: median and middle half of ``count``."""

    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What this device was measured to do: bytes/s of a copy, bf16 FLOP/s of a product."""

    bandwidth: float
    flops: float


class ColdCache:
    """A call leaves nothing in the L2 cache that anybody wants, and nothing to be written back.

    It reads other memory. What is written instead stays there, up to 50 MB that are not in memory
    yet, and work that is timed would wait for them on their way.
    """

    def __init__(self) -> None:
        self._other = torch.zeros(_L2_TIMES_FOUR // 4, dtype=torch.int32, device="cuda")
        self._largest = torch.empty((), dtype=torch.int32, device="cuda")

    def __call__(self) -> None:
        """Queue the reading."""
        torch.amax(self._other, dim=0, out=self._largest)


def time_call(work: Callable[[], object], *, count: int = 21) -> Timing:
    """Time ``count`` calls one by one with events, each with a cold L2 cache.

    The device first waits for some milliseconds, so that the host has queued everything by the time
    it begins: launch overhead of work in many pieces is hidden, for everyone alike.
    """
    for _ in range(3):
        work()
    cool = ColdCache()
    spans = []
    for _ in range(count):
        cool()
        torch.cuda._sleep(_AHEAD)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) * 1e3 for begin, end in spans)
    return Timing(
        median=times[count // 2], low=times[count // 4], high=times[-1 - count // 4], count=count
    )


def measure_ceilings() -> Ceilings:
    """A copy of 2 GiB (read and written), a product of 8192-wide random bf16 matrices."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    copy = time_call(lambda: target.copy_(source))
    side = 8192
    a, b = source[: side * side].view(side, side), source[-side * side :].view(side, side)
    product = time_call(lambda: a @ b)
    return Ceilings(
        bandwidth=2 * source.nbytes / copy.median * 1e6, flops=2 * side**3 / product.median * 1e6
    )
