"""How busy the device is, and what the engine's thread does meanwhile."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from k3vl.kernels.bench.parts import ON_DEVICE, events_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType


def device_time(seconds: float) -> dict[str, Any]:
    """What the device does for so long, whichever thread has asked for it."""
    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        time.sleep(seconds)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return summary_of(events_of(profiler), seconds)


def summary_of(events: Iterable[dict[str, Any]], seconds: float, *, shown: int = 15) -> Any:
    """Share of the time in which anything ran there, and what took longest.

    Args:
        events: of a Chrome trace; times in microseconds.
        seconds: that were traced.
        shown: names.
    """
    ran = [event for event in events if event.get("cat") in ON_DEVICE]
    busy = covered((event["ts"], event["ts"] + event["dur"]) for event in ran) / 1e6
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in ran:
        times[event["name"]] += event["dur"] / 1e6
        counts[event["name"]] += 1
    return {
        "seconds": seconds,
        "busy_share": min(1.0, busy / seconds),
        "operations_per_second": len(ran) / seconds,
        "longest": {
            name[:100]: {"seconds": spent, "count": counts[name]}
            for name, spent in times.most_common(shown)
        },
    }


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


class Sampler:
    """Looks at a thread's stack every other millisecond."""

    def __init__(self, thread_name: str, *, period: float = 0.002) -> None:
        self._name, self._period = thread_name, period
        self._stop = threading.Event()
        self._where: Counter[str] = Counter()
        self._under: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def report(self, shown: int = 25) -> dict[str, Any]:
        """Shares of the samples: by the innermost function of the package, and by any above it."""
        samples = max(1, self._where.total())
        return {
            "samples": self._where.total(),
            "innermost": {k: n / samples for k, n in self._where.most_common(shown)},
            "at_or_under": {k: n / samples for k, n in self._under.most_common(shown)},
        }

    def _run(self) -> None:
        while not self._stop.wait(self._period):
            idents = {thread.name: thread.ident for thread in threading.enumerate()}
            frame = sys._current_frames().get(idents.get(self._name) or -1)
            if stack := functions_of(frame):
                self._where[stack[0]] += 1
                self._under.update(set(stack))


def functions_of(frame: FrameType | None) -> list[str]:
    """Functions of the package on a stack, innermost first, as ``module:function``."""
    names = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("k3vl."):
            names.append(f"{module}:{frame.f_code.co_qualname}")
        frame = frame.f_back
    return names
