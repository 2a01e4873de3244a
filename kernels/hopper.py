"""What the Gluon kernels have in common: where they run."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton


@lru_cache
def hopper_runs(device: torch.device) -> bool:
    """Whether a device has what the kernel is made of, and Triton the Gluon it is written in.

    Warp groups got their present form in Triton 3.6; in the interpreter Gluon does not run.
    """
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) == (9, 0)
        and tuple(int(x) for x in triton.__version__.split(".")[:2]) >= (3, 6)
        and not triton.knobs.runtime.interpret
    )
