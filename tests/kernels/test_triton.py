"""Triton kernels: interpreted here, compiled on a machine with a CUDA device (``-m gpu``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process import run_check

CHECK = Path(__file__).with_name("triton_check.py")
OPS = (
    *("kda_decode", "kda_prefill", "kda_pieces", "mla_decode", "mla_prefill", "attn_residual"),
    *("vision", "decode_step", "prefill_pass"),
)


def run(op: str, device: str) -> None:
    printed = run_check(CHECK, op, device, interpret=device == "cpu")
    assert printed.count("check_") >= 1


@pytest.mark.parametrize("op", OPS)
def test_kernel_is_its_reference_in_the_interpreter(op: str) -> None:
    pytest.importorskip("triton")
    run(op, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_kernel_is_its_reference_on_the_device(op: str) -> None:
    run(op, "cuda")
