"""What makes the host wait for a CUDA device the first time: pages to lock, memory, kernels.

    python -m benchmarks.first_waits

A stream sleeps for a second. Meanwhile the host does one thing for the first time, then again, and
says how long each took: whatever takes the rest of the second waited for the device. Products are
of heights that no product had before, so the library may take kernels that CUDA has to load.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from k3vl.kernels.recording import OwnStream

if TYPE_CHECKING:
    from collections.abc import Callable

SECOND = 1_700_000_000
"""Cycles of an H200, about."""


def while_asleep(stream: torch.cuda.Stream, name: str, work: Callable[[], object]) -> None:
    """Milliseconds of the host, twice while the stream sleeps."""
    torch.cuda.synchronize()
    end = torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SECOND)
        end.record()
        times = []
        for _ in range(2):
            begin = time.perf_counter()
            held = work()
            times.append(1e3 * (time.perf_counter() - begin))
            waited = end.query()
            del held
    torch.cuda.synchronize()
    said = "WAITED" if waited else "did not wait"
    print(f"{name:40} first {times[0]:9.2f} ms, again {times[1]:9.2f} ms: {said}", flush=True)


def main() -> None:
    own, kept = OwnStream(), list[object]()
    stream = own.stream
    for power in (14, 17, 20, 22, 25):
        work = lambda n=2**power: kept.append(torch.empty(n, dtype=torch.uint8, pin_memory=True))  # noqa: E731
        while_asleep(stream, f"locking {2**power:,} bytes", work)
    for power in (12, 20, 25):
        work = lambda n=2**power: kept.append(torch.empty(n, dtype=torch.uint8, device="cuda"))  # noqa: E731
        while_asleep(stream, f"{2**power:,} bytes of the device", work)
    for dtype in (torch.float32, torch.bfloat16):
        w = torch.randn(1024, 1024, device="cuda", dtype=dtype)
        with torch.cuda.stream(stream):
            (torch.randn(180, 1024, device="cuda", dtype=dtype) @ w).sum()
        for height in (180, 140, 45, 35, 7, 300, 1000, 4096):
            x = torch.randn(height, 1024, device="cuda", dtype=dtype)
            while_asleep(stream, f"{dtype}, {height} rows", lambda x=x, w=w: x @ w)
    x = torch.randn(1000, device="cuda")
    while_asleep(stream, "another operator of torch", lambda: torch.erfinv(x))


if __name__ == "__main__":
    main()
