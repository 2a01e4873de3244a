"""The decoder of the joined products, written in machine code, on an imitation of its instructions.

The interpreter of Triton runs none of it, and a device has to be at hand for the rest.
"""

from __future__ import annotations

import pytest
import torch

from k3vl.kernels.moe.mxfp4 import pack_words
from k3vl.kernels.mxfp4 import dequantize_mxfp4
from tests.kernels.ptx_lanes_on_cpu import run_ptx, signed

pytest.importorskip("triton")

from k3vl.kernels.moe.joined_kernel import DECODE


def test_threads_decode_their_shares() -> None:
    """Rows r and r + 8, columns j, j + 1, j + 8, j + 9 of sixteen, for all eight n."""
    torch.manual_seed(1)
    packed = torch.randint(0, 256, (16, 64), dtype=torch.uint8)
    scale = torch.randint(0, 129, (16, 4), dtype=torch.uint8)
    want = dequantize_mxfp4(packed, scale, dtype=torch.float32).view(16, 16, 8).bfloat16().float()
    words = pack_words(packed).long() & 0xFFFFFFFF
    groups = scale.view(torch.int32).long() & 0xFFFFFFFF
    lane = torch.arange(32)
    elements = [
        (lane // 4 + 8 * (e >> 1 & 1), 2 * (lane % 4) + (e & 1) + 8 * (e >> 2 & 1), e >> 3)
        for e in range(64)
    ]
    operands = {32 + i: words[row, j] for i, (row, j, _) in enumerate(elements)}
    operands |= {96 + i: groups[row, 0] for i, (row, _, _) in enumerate(elements)}
    registers = run_ptx(str(DECODE.value), operands)
    got = torch.stack([signed(registers[f"${n}"]) for n in range(32)], 1)
    decoded = got.view(torch.bfloat16).float()
    for e, (row, j, n) in enumerate(elements):
        assert torch.equal(decoded[:, e], want[row, j, n])
