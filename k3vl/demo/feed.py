"""Batches from worker processes to the device.

Workers are forked before CUDA starts and touch no torch. A thread of the training process pins and
copies what they send.
"""

from __future__ import annotations

import multiprocessing
import queue
import random
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from k3vl.demo.atlas import load_atlas
from k3vl.demo.batches import Batch, BatchMaker
from k3vl.demo.buckets import BUCKETS, Bucket
from k3vl.demo.chat import Chat
from k3vl.demo.words import Printer, find_fonts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

_PREPARED = 24  # batches that wait between the workers and the thread
_READY = 3  # batches that wait on the device


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A batch on the device."""

    bucket: Bucket
    arrays: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Sources:
    """What a worker needs to build batches.

    Attributes:
        atlas: folder with the drawings and fonts.
        tokenizer: path of ``tokenizer.json``.
        size: samples of a batch; None fills the token budget.
    """

    atlas: Path
    tokenizer: Path
    size: int | None = None


def to_device(batch: Batch, printer: Printer, device: torch.device) -> DeviceBatch:
    """Print the text strips and copy everything, in the calling process."""
    arrays = batch.arrays() | {"strips": printer.strips(batch.texts)}
    return DeviceBatch(
        batch.bucket, {name: torch.from_numpy(a).to(device) for name, a in arrays.items()}
    )


def _work(out: Any, early: Any, sources: Sources, seed: int) -> None:
    """Endless batches of random buckets; only the early ones while ``early`` is set."""
    atlas = load_atlas(sources.atlas)
    fonts = find_fonts(sources.atlas)
    maker = BatchMaker(atlas, Chat(sources.tokenizer), seed, fonts)
    printer = Printer(fonts, seed)
    rng = random.Random(seed)  # noqa: S311 - scenes, not secrets
    while True:
        choice = [b for b in BUCKETS if b.early or not early.value]
        bucket = rng.choices(choice, [b.share for b in choice])[0]
        batch = maker.batch(bucket, sources.size)
        arrays = batch.arrays() | {"strips": printer.strips(batch.texts)}
        out.put((bucket.name, arrays))


class Feed:
    """Worker processes and the copying thread.

    Make it before anything touches CUDA, and call :meth:`start` after.

    Args:
        sources: what the workers read.
        workers: how many.
        early: begin with the early buckets.
        seed: the workers take ``seed``, ``seed + 1``, ...
    """

    def __init__(self, sources: Sources, workers: int, *, early: bool, seed: int) -> None:
        context = multiprocessing.get_context("fork")
        self._prepared = context.Queue(_PREPARED)
        self._early = context.Value("b", early)
        self._processes = [
            context.Process(
                target=_work,
                args=(self._prepared, self._early, sources, seed + i),
                daemon=True,
            )
            for i in range(workers)
        ]
        for process in self._processes:
            process.start()
        self._ready: queue.Queue[DeviceBatch] = queue.Queue(_READY)
        self._stop = threading.Event()
        self._buckets = {bucket.name: bucket for bucket in BUCKETS}
        self._thread: threading.Thread | None = None

    def start(self, device: torch.device) -> None:
        """Begin to copy batches to ``device``."""
        self._thread = threading.Thread(target=self._copy, args=(device,), daemon=True)
        self._thread.start()

    def next(self) -> DeviceBatch:
        """The next batch; waits for it.

        Raises:
            RuntimeError: a worker has died.
        """
        while True:
            try:
                batch = self._ready.get(timeout=5)
            except queue.Empty:
                if dead := [p.exitcode for p in self._processes if not p.is_alive()]:
                    raise RuntimeError(f"a data worker ended with code {dead[0]}") from None
                continue
            for tensor in batch.arrays.values():
                if tensor.is_cuda:
                    # It was allocated on the copying stream, which may reuse it once it is freed.
                    tensor.record_stream(torch.cuda.current_stream())
            return batch

    def all_buckets(self) -> None:
        """Leave the early phase."""
        self._early.value = False

    def close(self) -> None:
        """End the workers and the thread."""
        self._stop.set()
        for process in self._processes:
            process.terminate()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _copy(self, device: torch.device) -> None:
        move = _pinned_copy(device) if device.type == "cuda" else torch.from_numpy
        while not self._stop.is_set():
            try:
                name, arrays = self._prepared.get(timeout=1)
            except queue.Empty:
                continue
            batch = DeviceBatch(
                self._buckets[name], {key: move(value) for key, value in arrays.items()}
            )
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            self._hand_over(batch)

    def _hand_over(self, batch: DeviceBatch) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(batch, timeout=1)
            except queue.Full:
                continue
            return


def _pinned_copy(device: torch.device) -> Callable[[Any], Tensor]:
    """Copies on a side stream of the calling thread, so that training does not wait for them."""
    torch.cuda.set_device(device)
    torch.cuda.set_stream(torch.cuda.Stream(device))

    def move(array: Any) -> Tensor:
        return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)

    return move
