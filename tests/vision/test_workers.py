"""Media in worker processes: the same results, and an end to whatever hangs."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest

from k3vl.config import K3_MEDIA
from k3vl.errors import CapacityError, MediaError
from k3vl.types import MediaPart
from k3vl.vision.processor import MediaProcessor
from k3vl.vision.workers import MediaWorkers

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOX = (EXAMPLES / "fox-kite-bus.png").read_bytes()
CLIP = next(EXAMPLES.glob("*.mp4")).read_bytes()


def living_workers() -> list[psutil.Process]:
    """Worker processes of this process; other tests may have left zombies of their own."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # and its kind, ZombieProcess
            if "k3vl.vision.worker" in child.cmdline():
                found.append(child)
    return found


def with_workers(test, **options):
    """Run a test's coroutine with a pool."""

    async def main() -> None:
        workers = MediaWorkers(MediaProcessor(K3_MEDIA), **{"num_workers": 1, **options})
        try:
            await test(workers)
        finally:
            await workers.close()
        assert workers.num_jobs == 0

    before = {child.pid for child in psutil.Process().children()}
    asyncio.run(main())
    assert {child.pid for child in psutil.Process().children()} <= before


def same(left, right) -> None:
    assert left.layout == right.layout
    assert left.frame_times == right.frame_times
    assert left.warnings == right.warnings
    for a, b in zip(left.items, right.items, strict=True):
        assert (a.digest, a.grid_thw, a.num_tokens) == (b.digest, b.grid_thw, b.num_tokens)
        np.testing.assert_array_equal(a.patches, b.patches)


def test_workers_do_what_the_processor_does() -> None:
    async def test(workers: MediaWorkers) -> None:
        here = MediaProcessor(K3_MEDIA)
        url = "data:image/png;base64," + base64.b64encode(FOX).decode()
        parts = [
            MediaPart("image", FOX),
            MediaPart("image", url),
            MediaPart("image", FOX, "low"),
            MediaPart("video", CLIP),
        ]
        results = await asyncio.gather(*map(workers.process, parts))
        for part, result in zip(parts, results, strict=True):
            same(result, here.process(part))
        with pytest.raises(MediaError) as caught:
            await workers.process(MediaPart("image", b"GIF89a"))
        with pytest.raises(MediaError, match=str(caught.value)) as expected:
            here.process(MediaPart("image", b"GIF89a"))
        assert caught.value.code == expected.value.code

    with_workers(test)


def test_a_worker_that_hangs_is_replaced() -> None:
    async def test(workers: MediaWorkers) -> None:
        await workers.process(MediaPart("image", FOX))
        (child,) = living_workers()
        os.kill(child.pid, signal.SIGSTOP)
        workers._max_seconds = 0.3
        with pytest.raises(MediaError) as caught:
            await workers.process(MediaPart("image", FOX))
        assert caught.value.code == "media_timeout"
        workers._max_seconds = 30
        await workers.process(MediaPart("image", FOX))

    with_workers(test)


def test_a_worker_that_dies_takes_one_part_with_it() -> None:
    async def test(workers: MediaWorkers) -> None:
        await workers.process(MediaPart("image", FOX))
        (child,) = living_workers()
        os.kill(child.pid, signal.SIGSTOP)
        job = asyncio.create_task(workers.process(MediaPart("image", FOX)))
        await asyncio.sleep(0.05)
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(MediaError) as caught:
            await job
        assert caught.value.code == "image_failed"
        await workers.process(MediaPart("image", FOX))

    with_workers(test)


def test_a_worker_that_died_idle_harms_nobody() -> None:
    async def test(workers: MediaWorkers) -> None:
        await workers.process(MediaPart("image", FOX))
        (child,) = living_workers()
        child.kill()
        psutil.wait_procs([child], timeout=10)
        await workers.process(MediaPart("image", FOX))

    with_workers(test)


def test_an_abandoned_worker_is_killed_if_it_goes_on() -> None:
    async def test(workers: MediaWorkers) -> None:
        await workers.process(MediaPart("image", FOX))
        (child,) = living_workers()
        os.kill(child.pid, signal.SIGSTOP)
        job = asyncio.create_task(workers.process(MediaPart("image", FOX)))
        await asyncio.sleep(0.05)
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        assert workers.num_jobs == 0
        await workers.process(MediaPart("image", FOX))  # by its successor

    with_workers(test)


def test_too_many_parts_are_refused() -> None:
    async def test(workers: MediaWorkers) -> None:
        parts = [MediaPart("image", FOX)] * 4
        results = await asyncio.gather(*map(workers.process, parts), return_exceptions=True)
        assert [isinstance(result, CapacityError) for result in results] == [
            False,
            False,
            True,
            True,
        ]

    with_workers(test, max_jobs=2)
