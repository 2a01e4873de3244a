"""Decoding in other processes: the same results and errors, and nothing that stays behind."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from PIL import Image

from k3vl.config import K3_MEDIA
from k3vl.errors import Cancelled, MediaError
from k3vl.types import MediaPart
from k3vl.vision.pool import PooledProcessor
from k3vl.vision.processor import MediaProcessor
from k3vl.vision.source import FetchPolicy
from tests.vision.test_workers import CLIP, EXAMPLES, FOX, living_workers, same

FOX_PATH = EXAMPLES / "fox-kite-bus.png"
CLIP_PATH = next(EXAMPLES.glob("*.mp4"))
SHARED = Path("/dev/shm")


@pytest.fixture
def pool():
    before = {child.pid for child in living_workers()}
    made = PooledProcessor(K3_MEDIA, num_workers=2)
    yield made
    made.close()
    assert {child.pid for child in living_workers()} <= before


def test_it_does_what_the_processor_does(pool: PooledProcessor) -> None:
    here = MediaProcessor(K3_MEDIA)
    sources = [
        MediaPart("image", FOX),
        MediaPart("image", FOX_PATH),
        MediaPart("image", FOX, "low"),
        MediaPart("image", "data:image/png;base64," + base64.b64encode(FOX).decode()),
        MediaPart("image", Image.open(FOX_PATH)),
        MediaPart("video", CLIP),
        MediaPart("video", CLIP_PATH),
        MediaPart("video", Path(os.path.relpath(CLIP_PATH))),
    ]
    with ThreadPoolExecutor(8) as threads:  # of more threads than there are workers
        for source, result in zip(sources, threads.map(pool.process, sources), strict=True):
            same(result, here.process(source))
    same(pool.process(FOX), here.process(FOX))


@pytest.mark.parametrize(
    "source",
    [
        MediaPart("image", b""),
        MediaPart("image", b"GIF89a"),
        MediaPart("image", FOX[:2000]),
        MediaPart("image", Path("/nowhere/picture.png")),
        MediaPart("image", CLIP_PATH),
        MediaPart("image", "file:///etc/passwd"),
        MediaPart("video", Path("/nowhere/clip.mp4")),
        MediaPart("video", FOX_PATH),
        MediaPart("video", CLIP[:3000]),
        MediaPart("video", Image.new("RGB", (28, 28))),
    ],
)
def test_errors_are_those_of_the_processor(pool: PooledProcessor, source: MediaPart) -> None:
    with pytest.raises(MediaError) as expected:
        MediaProcessor(K3_MEDIA).process(source)
    with pytest.raises(MediaError) as caught:
        pool.process(source)
    assert (str(caught.value), caught.value.code) == (str(expected.value), expected.value.code)


def test_a_directory_that_is_gone_ends_one_part(
    pool: PooledProcessor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the thread, for which all others wait."""
    pool.process(FOX)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    with pytest.raises(MediaError, match=r"picture\.png: no such file"):
        pool.begin(MediaPart("image", Path("picture.png"))).result(20)
    same(pool.begin(MediaPart("image", FOX_PATH)).result(20), MediaProcessor(K3_MEDIA).process(FOX))


def test_what_is_too_large_reaches_no_worker() -> None:
    pool = PooledProcessor(K3_MEDIA, policy=FetchPolicy(max_bytes=1000), num_workers=1)
    with pytest.raises(MediaError) as caught:
        pool.process(MediaPart("image", FOX_PATH))
    assert caught.value.code == "media_too_large"
    assert not pool._idle


def test_a_picture_that_is_kept_asks_no_worker() -> None:
    pool = PooledProcessor(K3_MEDIA, keep_bytes=2**24, num_workers=1)
    cold = pool.process(FOX)
    pool.close()
    assert pool.process(FOX_PATH) is cold


def test_few_parts_start_few_workers(pool: PooledProcessor) -> None:
    for _ in range(3):
        pool.process(FOX)
    assert len(pool._idle) == 1


@pytest.mark.parametrize("idle", [True, False])
def test_a_worker_that_dies_takes_one_part_with_it(pool: PooledProcessor, idle: bool) -> None:
    pool.process(FOX)
    (child,) = living_workers()
    if idle:
        child.kill()
        psutil.wait_procs([child], timeout=10)
    else:
        os.kill(child.pid, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as threads:
            job = threads.submit(pool.process, FOX)
            while not pool._busy:
                time.sleep(0.001)
            os.kill(child.pid, signal.SIGKILL)
            with pytest.raises(MediaError, match="the decoder died of it"):
                job.result(20)
    same(pool.process(FOX), MediaProcessor(K3_MEDIA).process(FOX))
    assert child.pid not in {other.pid for other in living_workers()}


def test_many_are_done_together_and_each_has_its_own_end(pool: PooledProcessor) -> None:
    here, bad = MediaProcessor(K3_MEDIA), MediaPart("image", FOX[:2000])
    parts = [MediaPart("image", FOX_PATH), bad, MediaPart("image", FOX), bad] * 9
    begun = [pool.begin(part) for part in (*parts, MediaPart("video", CLIP), *parts)]
    for part, made in zip((*parts, MediaPart("video", CLIP), *parts), begun, strict=True):
        if part is bad:
            with pytest.raises(MediaError, match="truncated"):
                made.result(60)
        else:
            same(made.result(60), here.process(part))


def test_a_worker_that_dies_with_several_takes_none_with_it_that_another_can_do() -> None:
    pool = PooledProcessor(K3_MEDIA, num_workers=1)
    pool.process(FOX)
    (child,) = living_workers()
    os.kill(child.pid, signal.SIGSTOP)
    alone = pool.begin(MediaPart("image", FOX_PATH))
    begun = [pool.begin(MediaPart("image", FOX_PATH)) for _ in range(5)]
    os.kill(child.pid, signal.SIGKILL)
    with contextlib.suppress(MediaError):  # it was written alone, if the thread was quick
        alone.result(20)
    for made in begun:
        same(made.result(20), MediaProcessor(K3_MEDIA).process(FOX))
    pool.close()
    assert living_workers() == []


def test_parts_that_nobody_wants_any_more_are_not_done(pool: PooledProcessor) -> None:
    pool.process(FOX)
    children = living_workers()
    for child in children:
        os.kill(child.pid, signal.SIGSTOP)
    begun = [pool.begin(MediaPart("video", CLIP_PATH)) for _ in range(9)]
    cancelled = [made.cancel() for made in begun[2:]]
    assert all(cancelled)
    for child in children:
        os.kill(child.pid, signal.SIGCONT)
    for made in begun[:2]:
        made.result(60)
    assert not pool._waiting


def test_closing_ends_what_is_under_way(pool: PooledProcessor) -> None:
    pool.process(FOX)
    (child,) = living_workers()
    os.kill(child.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        job = threads.submit(pool.process, FOX)
        while not pool._busy:
            time.sleep(0.001)
        pool.close()
        with pytest.raises(Cancelled):
            job.result(20)
    with pytest.raises(Cancelled):
        pool.process(FOX)
    assert living_workers() == []


OWNER = f"""
import sys, threading, time
from pathlib import Path
from k3vl.config import K3_MEDIA
from k3vl.vision.pool import PooledProcessor

pool = PooledProcessor(K3_MEDIA, num_workers=2)
def work():
    while True:
        pool.process(Path({str(FOX_PATH)!r}))
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
while len(pool._busy) + len(pool._idle) < 2:
    time.sleep(0.01)
time.sleep(1.0)
print("busy", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_owner_that_is_killed_leaves_nothing_behind(number: signal.Signals) -> None:
    shared = set(SHARED.iterdir()) if SHARED.is_dir() else set()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"busy\n", owner.communicate()
    children = psutil.Process(owner.pid).children()
    assert len(children) == 2
    owner.send_signal(number)
    _, said = owner.communicate(timeout=60)
    assert said == b"", "workers end without a word"
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
    if SHARED.is_dir():
        assert set(SHARED.iterdir()) <= shared
