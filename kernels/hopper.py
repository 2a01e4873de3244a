"""What the Gluon kernels have in common: where they run, and how they are told of matrices."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton


@lru_cache
def hopper_runs(device: torch.device) -> bool:
    """Whether a device has what the kernels are made of, and Triton compiles.

    In the interpreter Gluon does not run.
    """
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) == (9, 0)
        and not triton.knobs.runtime.interpret
    )


def block_descriptor(x: torch.Tensor, block: list[int]) -> Any:
    """For the copy engine: blocks of a matrix of 16 bits, laid out as products read them."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(x, block, layout)
