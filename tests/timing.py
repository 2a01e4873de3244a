"""Limits that a busy machine does not break: processor time for work, patience for all else."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def cpu_limit(seconds: float, clock: Callable[[], float] = time.thread_time) -> Iterator[None]:
    """What happens inside takes less processor time.

    Args:
        seconds: the limit.
        clock: counts this thread; ``time.process_time`` counts all threads.
    """
    begun = clock()
    yield
    spent = clock() - begun
    assert spent < seconds, f"{spent:.2f} s of processor time"


def until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)
