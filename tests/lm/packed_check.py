"""Packed experts in a process of their own; started by ``test_packed.py``.

Usage: packed_check.py memory DIRECTORY packed|float, or packed_check.py triton DIRECTORY. The last
line of standard output is the result, as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from k3vl.checkpoint import CheckpointReader
from k3vl.config import load_config
from k3vl.kernels.choice import Kernels, reference_kernels
from k3vl.lm.batch import Row, build_batch
from k3vl.lm.cache import HybridCache, plan_cache
from k3vl.lm.weights import load_model
from k3vl.synthetic import slice_config, write_slice

if TYPE_CHECKING:
    from k3vl.lm.model import K3Model

CPU = torch.device("cpu")


def load(directory: Path, kernels: Kernels, dtype: torch.dtype) -> K3Model:
    config = load_config(directory).text
    return load_model(CheckpointReader(directory), config, kernels, dtype=dtype, device=CPU)


def resident() -> tuple[int, int]:
    """Bytes of own and of mapped memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")}
    return int(sizes["RssAnon"]) << 10, int(sizes["RssFile"]) << 10


def memory(directory: Path, form: str) -> dict[str, float]:
    """Most that loading adds, looked at every half millisecond."""
    kernels = reference_kernels("tests")
    if form == "float":
        kernels = replace(kernels, latent_moe_mxfp4=None)
    with TemporaryDirectory() as small:  # whatever is loaded or allocated once
        write_slice(Path(small), slice_config(4, tiny=True))
        load(Path(small), kernels, torch.bfloat16)
    peaks, done = [0, 0], threading.Event()
    before = resident()

    def watch() -> None:
        while not done.is_set():
            now = resident()
            for i in range(2):
                peaks[i] = max(peaks[i], now[i] - before[i])
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load(directory, kernels, torch.bfloat16)
    done.set()
    watcher.join()
    experts = sum(buffer.nbytes for buffer in model.buffers())
    return {"own": peaks[0], "mapped": peaks[1], "experts": experts}


def logits(model: K3Model, ids: torch.Tensor) -> torch.Tensor:
    """A prompt in passes of 1 and 19 tokens, then a token of decoding beside another prompt's."""
    dtype = model.embedding.dtype
    sizes = plan_cache(model.config, dtype, budget_bytes=1 << 24, page_size=64)
    cache = HybridCache(model.config, sizes, dtype=dtype, device=CPU)
    slots = [range(sizes.units_per_slot * i, sizes.units_per_slot * (i + 1)) for i in range(2)]
    pages = [[2 * sizes.units_per_slot + i] for i in range(2)]
    out = []

    def run(*spans: tuple[int, int, int]) -> None:
        rows = [
            Row(
                token_ids=ids[slot, begin:end].tolist(),
                context_len=begin,
                slot=slots[slot],
                pages=pages[slot],
                # One token is a prefill of its own, not a step of decoding.
                pad_to=16 if begin == 0 else 0,
            )
            for slot, begin, end in spans
        ]
        batch = build_batch(rows, cache)
        out.append(model(batch, cache))

    for slot, begin, end in ((0, 0, 1), (0, 1, 20), (1, 0, 3)):
        run((slot, begin, end))
    run((0, 20, 21), (1, 3, 4))
    return torch.cat(out)


def triton(directory: Path) -> dict[str, float]:
    from k3vl.kernels.choice import triton_kernels

    generator = torch.Generator().manual_seed(time.time_ns() % 2**32)
    ids = torch.randint(512, (2, 21), generator=generator)
    ours = load(directory, triton_kernels("tests"), torch.float32)
    assert ours.experts == "mxfp4"
    got = logits(ours, ids)
    want = logits(load(directory, reference_kernels("tests"), torch.float64), ids)
    assert got.isfinite().all()
    return {"error": float((got - want).norm() / want.norm())}


def main() -> None:
    directory = Path(sys.argv[2])
    result = triton(directory) if sys.argv[1] == "triton" else memory(directory, sys.argv[3])
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
