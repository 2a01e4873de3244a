"""Media in worker processes: the same results, and an end to whatever hangs."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from k3vl.config import K3_MEDIA
from k3vl.errors import CapacityError, MediaError
from k3vl.types import MediaPart
from k3vl.vision import worker, workers
from k3vl.vision.processor import MediaProcessor
from k3vl.vision.source import FetchPolicy
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


def with_workers(test, processor=None, **options):
    """Run a test's coroutine with a pool."""
    processor = processor or MediaProcessor(K3_MEDIA)

    async def main() -> None:
        workers = MediaWorkers(processor, **{"num_workers": 1, **options})
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


def test_patches_come_through_the_pipe_where_no_memory_is_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "_unnamed_file", lambda: None)

    async def test(pool: MediaWorkers) -> None:
        here = MediaProcessor(K3_MEDIA)
        for part in (MediaPart("image", FOX), MediaPart("video", CLIP)):
            same(await pool.process(part), here.process(part))

    with_workers(test)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory is shared")
def test_shared_memory_is_read_whole_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_KEPT_BYTES", 1000)
    first, second = np.arange(900, dtype=np.uint8), np.arange(100, dtype=np.uint8)
    with workers._unnamed_file() as file:
        for blobs, left in (((first, second), 1000), ((first, second, second), 0)):
            worker.store(file.fileno(), [blob.data for blob in blobs])
            found = worker.fetch(file.fileno(), [len(blob) for blob in blobs])
            for one, blob in zip(found, blobs, strict=True):
                np.testing.assert_array_equal(one, blob)
            assert os.fstat(file.fileno()).st_size == left
        worker.store(file.fileno(), [])
        assert worker.fetch(file.fileno(), []) == []
        with pytest.raises(EOFError):
            worker.fetch(file.fileno(), [1])


def test_what_was_handed_out_stays_as_it_was() -> None:
    """The memory of a worker is written again; its answers are copies."""

    async def test(pool: MediaWorkers) -> None:
        (item,) = (await pool.process(MediaPart("image", FOX))).items
        before = item.patches.copy()
        await pool.process(MediaPart("video", CLIP))
        np.testing.assert_array_equal(item.patches, before)

    with_workers(test)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux lists them")
def test_workers_that_were_killed_leave_no_files_open() -> None:
    def files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    counts = []
    for _ in range(2):
        pool = MediaWorkers(MediaProcessor(K3_MEDIA), num_workers=2)
        pool.kill()
        counts.append(files())
    assert counts[0] == counts[1]


@pytest.mark.skipif(not hasattr(os, "nice"), reason="no niceness here")
@pytest.mark.parametrize("niceness", [0, 5])
def test_workers_give_way_as_they_are_told(niceness: int) -> None:
    async def test(pool: MediaWorkers) -> None:
        await pool.process(MediaPart("image", FOX))
        (process,) = living_workers()
        assert process.nice() == min(19, psutil.Process().nice() + niceness)

    with_workers(test, niceness=niceness)


def test_parts_are_processed_side_by_side() -> None:
    async def test(workers: MediaWorkers) -> None:
        await asyncio.gather(*(workers.process(MediaPart("image", FOX)) for _ in range(2)))
        first, _ = living_workers()
        os.kill(first.pid, signal.SIGSTOP)
        jobs = [asyncio.create_task(workers.process(MediaPart("image", FOX))) for _ in range(2)]
        done, waiting = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        assert (len(done), len(waiting)) == (1, 1), "one goes on while the other is held"
        os.kill(first.pid, signal.SIGCONT)
        await asyncio.gather(*jobs)

    with_workers(test, num_workers=2)


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


def test_memory_is_limited_by_the_system() -> None:
    out = io.BytesIO()
    Image.new("RGB", (16_000, 9_000)).save(out, "PNG")  # small file, small header, 432 MB of pixels
    limit = 256 * 2**20

    async def test(workers: MediaWorkers) -> None:
        for source in (out.getvalue(), FOX):  # the first starts it
            with contextlib.suppress(MediaError):
                await workers.process(MediaPart("image", source))
        (child,) = living_workers()
        job = asyncio.create_task(workers.process(MediaPart("image", out.getvalue())))
        peak = 0
        while not job.done():
            peak = max(peak, child.memory_info().rss)
            await asyncio.sleep(0.002)
        with pytest.raises(MediaError) as caught:
            await job
        assert caught.value.code in ("image_too_large", "media_too_large")
        assert peak < limit + 100 * 2**20, "with the code of libraries, which is not counted"
        assert living_workers() == [child], "it goes on"
        await workers.process(MediaPart("image", FOX))

    with_workers(test, max_memory=limit)


def test_workers_do_not_load_the_model_library() -> None:
    asked = "import sys, k3vl.vision.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0


def test_a_data_url_that_is_too_long_never_reaches_a_worker() -> None:
    async def test(workers: MediaWorkers) -> None:
        with pytest.raises(MediaError) as caught:
            await workers.process(MediaPart("image", "data:;base64," + "A" * 4_000_000))
        assert caught.value.code == "media_too_large"
        assert all(worker._kind is None for worker in workers._idle)

    policy = FetchPolicy(max_bytes=2**20)
    with_workers(test, processor=MediaProcessor(K3_MEDIA, policy=policy))


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


def test_a_worker_that_was_never_used_ends_quietly() -> None:
    """A server that fails during its start has enough to say itself."""
    line = [sys.executable, "-m", "k3vl.vision.worker"]
    ended = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
    assert ended.returncode == 0
    assert ended.stderr == b""


def test_a_pool_can_be_ended_from_outside_of_its_loop() -> None:
    pool = MediaWorkers(MediaProcessor(K3_MEDIA), num_workers=2)
    assert len(living_workers()) == 2
    pool.kill()
    assert living_workers() == []


def memory(process: psutil.Process, which: str) -> int:
    """``VmRSS``, what a process holds now, or ``VmHWM``, the most since :func:`forget_peak`."""
    status = Path("/proc", str(process.pid), "status").read_text()
    lines = dict(line.split(":", 1) for line in status.splitlines())
    return 1024 * int(lines[which].split()[0])


def forget_peak(process: psutil.Process) -> None:
    Path("/proc", str(process.pid), "clear_refs").write_text("5")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells peaks")
@pytest.mark.parametrize("unit", ["A", "%41", "A\n"])
def test_a_long_data_url_is_held_once(unit: str) -> None:
    """In the worker what came and what it stands for, here nothing beside what came."""
    length = 12 * 2**20
    url = "data:image/png;base64," + unit * (length // len(unit))

    async def test(workers: MediaWorkers) -> None:
        await workers.process(MediaPart("image", FOX))
        processes = {"worker": living_workers()[0], "server": psutil.Process()}
        before = {}
        for name, process in processes.items():
            forget_peak(process)
            before[name] = memory(process, "VmRSS")
        with pytest.raises(MediaError) as caught:
            await workers.process(MediaPart("image", url))
        assert caught.value.code == "not_an_image"
        extra = {name: memory(p, "VmHWM") - before[name] for name, p in processes.items()}
        assert extra["worker"] < 2 * length + 2**21, extra
        assert extra["server"] < 2**21, extra

    with_workers(test)


NO_THREADS = """
import resource, sys, threading
from k3vl.config import K3_MEDIA
from k3vl.vision.processor import MediaProcessor

resource.setrlimit(resource.RLIMIT_DATA, (2**29, 2**29))
try:
    threading.Thread(target=print).start()
except RuntimeError:
    media = MediaProcessor(K3_MEDIA).process(open(sys.argv[1], "rb").read(), "video")
    print(*(item.digest for item in media.items), *media.warnings)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="stacks of threads count as data there")
def test_a_machine_that_has_no_more_threads_decodes_without() -> None:
    """A thread's stack is larger than all that the process may have."""
    line = 'ulimit -s 1048576 && exec "$0" -c "$1" "$2"'
    path = next(EXAMPLES.glob("*.mp4"))
    found = subprocess.run(
        ["/bin/sh", "-c", line, sys.executable, NO_THREADS, str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    media = MediaProcessor(K3_MEDIA).process(CLIP, "video")
    assert found.stdout.split() == [item.digest for item in media.items], found.stderr
    assert not media.warnings
