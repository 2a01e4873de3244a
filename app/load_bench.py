"""``k3vl bench load``: how fast a checkpoint's language model comes into memory."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from k3vl.checkpoint import CheckpointReader
from k3vl.config import checkpoint_path, load_config
from k3vl.kernels.choice import choose
from k3vl.lm.weights import PREFIX, load_model
from k3vl.load import choose_device

if TYPE_CHECKING:
    from pathlib import Path

    from k3vl.load import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """One load.

    Attributes:
        stored, held: bytes in the files, and of the model's weights.
        seconds: until the last byte is on the device.
        peak: most bytes that the device had at once; of the process where the device is the CPU,
            the mapped file among them.
        form: of the routed experts.
    """

    stored: int
    held: int
    seconds: float
    peak: int
    form: str

    def __str__(self) -> str:
        rate = self.stored / self.seconds / 1e9
        return (
            f"{self.stored / 1e9:.2f} GB stored, {self.held / 1e9:.2f} GB held (experts: "
            f"{self.form}) in {self.seconds:.1f} s: {rate:.2f} GB/s, peak {self.peak / 1e9:.2f} GB"
        )


def bench_load(directory: Path, device: Device) -> Loaded:
    """Load once; what the system has cached of the files is not read again.

    Raises:
        ConfigError: there is no usable configuration, or no such device.
        WeightError: the weights are not those of the configuration.
    """
    directory = checkpoint_path(directory)
    config = load_config(directory).text
    where, dtype = choose_device(device)
    reader = CheckpointReader(directory)
    specs = reader.specs()
    begin = time.perf_counter()
    model = load_model(reader, config, choose(where, dtype), dtype=dtype, device=where)
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    seconds = time.perf_counter() - begin
    return Loaded(
        stored=sum(spec.nbytes for name, spec in specs.items() if name.startswith(PREFIX)),
        held=sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        seconds=seconds,
        peak=_peak(where),
        form=model.experts,
    )


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1 << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
