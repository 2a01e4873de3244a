"""What a recorded pass of K3's vision tower saves, by the size of the batch.

    python benchmarks/vision_repeats.py [--tiny] [--output FILE.jsonl]

K3's tower and projector with random bfloat16 weights on a CUDA device, from patches in host memory
to rows on the device, launched (``eager``) and replayed (``graph``), in turns. Of each batch:

- ``host_ms``: until ``encode`` returns, the device idle before; what the engine's thread pays;
- ``device_ms``: between events, with everything launched beforehand; what the device computes;
- ``whole_ms``: from the call until the rows are there.

``record_ms`` is the call that records, ``record_mib`` what the memory of torch grew by in it. The
threshold in ``k3vl/vision/repeats.py`` belongs where ``device_ms`` has long passed ``host_ms``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from k3vl.config import K3_MEDIA, parse_config
from k3vl.kernels.bench.about import append_lines, describe
from k3vl.kernels.choice import choose
from k3vl.kernels.recording import GraphRunner
from k3vl.synthetic import slice_config
from k3vl.types import EncoderItem
from k3vl.vision.encoder import VisionEncoder, pin_patches
from k3vl.vision.projector import PatchMerger
from k3vl.vision.tower import VisionTower

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3vl.config import VisionConfig

DTYPE, DEVICE = torch.bfloat16, torch.device("cuda")
COUNT = 21
AHEAD = 60_000_000
"""Cycles that the device sleeps while everything is launched: some 35 ms."""
BATCHES = {
    "224 px": ((1, 16, 16), (1, 2, 3, 4, 5, 6, 8, 12, 16)),
    "448 px": ((1, 32, 32), (1, 2, 3, 4)),
    "640 x 480": ((1, 34, 46), (1, 2)),
    "group of 4 frames, 320 x 240": ((4, 18, 22), (1, 2)),
    "896 px": ((1, 64, 64), (1,)),
    "1036 px": ((1, 74, 74), (1,)),
}
"""Grid and counts; those beyond the threshold run launched on both sides."""


def models(config: VisionConfig) -> tuple[VisionTower, PatchMerger]:
    """Random weights of unit scale: times do not depend on them, overflow would."""
    kernels = choose(DEVICE, DTYPE).vision
    tower = VisionTower(config, K3_MEDIA, dtype=DTYPE, device=DEVICE, kernels=kernels)
    projector = PatchMerger(config, dtype=DTYPE, device=DEVICE, kernels=kernels)
    generator = torch.Generator(DEVICE).manual_seed(0)
    for parameter in (*tower.parameters(), *projector.parameters()):
        parameter.requires_grad_(False)
        if parameter.ndim == 1:
            parameter.fill_(1)
        else:
            parameter.normal_(0, parameter[0].numel() ** -0.5, generator=generator)
    return tower, projector


def items(grid: tuple[int, int, int], count: int) -> list[EncoderItem]:
    frames, rows, columns = grid
    rng = np.random.default_rng(0)
    return [
        EncoderItem(
            f"{number}",
            rng.integers(0, 256, (frames * rows * columns, 3, 14, 14), dtype=np.uint8),
            grid,
            rows * columns // 4,
        )
        for number in range(count)
    ]


def milliseconds(work: Callable[[], object], *, whole: bool) -> float:
    """Of one call on an idle device, with its end or without."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    if whole:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def on_device(work: Callable[[], object]) -> float:
    """Milliseconds between events, the launches queued before the first."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD)
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def measure(eager: VisionEncoder, graph: VisionEncoder, batch: list[EncoderItem]) -> dict[str, Any]:
    sides = {"eager": eager, "graph": graph}
    for _ in range(3):
        eager.encode(batch)
    graph.encode(batch)
    reserved = torch.cuda.memory_reserved()
    record = milliseconds(lambda: graph.encode(batch), whole=True)
    grown = torch.cuda.memory_reserved() - reserved
    assert all(map(torch.equal, graph.encode(batch), graph.encode(batch)))
    spent: dict[str, list[float]] = {}
    for _ in range(COUNT):
        for name, encoder in sides.items():
            for kind, whole in (("host", False), ("whole", True)):
                taken = milliseconds(lambda e=encoder: e.encode(batch), whole=whole)
                spent.setdefault(f"{name}_{kind}_ms", []).append(taken)
    result: dict[str, Any] = {name: round(median(values), 3) for name, values in spent.items()}
    for name, encoder in sides.items():
        taken = [on_device(lambda e=encoder: e.encode(batch)) for _ in range(COUNT)]
        result[f"{name}_device_ms"] = round(median(taken), 3)
    patches = sum(len(item.patches) for item in batch)
    record = {"record_ms": round(record, 1), "record_mib": round(grown / 2**20, 1)}
    return {"patches": patches, "records": len(graph.repeats._records), **result, **record}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small numbers in place of K3's")
    parser.add_argument("--commit", help="of the code, where there is no repository")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    config = parse_config(slice_config(2, tiny=options.tiny)).vision
    about = {**describe(DEVICE, None, commit=options.commit), "op": "vision_repeats"}
    tower, projector = models(config)
    eager = VisionEncoder(tower, projector, max_patches_per_batch=8192, join=pin_patches)
    for name, (grid, counts) in BATCHES.items():
        for count in counts:
            graph = VisionEncoder(
                *(tower, projector),
                max_patches_per_batch=8192,
                join=pin_patches,
                runner=GraphRunner(),
            )
            line = {**about, "shape": f"{count} x {name}"}
            line |= measure(eager, graph, items(grid, count))
            print(json.dumps({k: v for k, v in line.items() if k not in about}), flush=True)
            if options.output:
                append_lines(options.output, [line])


if __name__ == "__main__":
    main()
