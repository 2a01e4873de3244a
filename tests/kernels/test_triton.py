"""Triton kernels: interpreted here, compiled on a machine with a CUDA device (``-m gpu``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).with_name("triton_check.py")
ROOT = Path(__file__).resolve().parents[2]
OPS = (
    *("kda_decode", "kda_prefill", "mla_decode", "mla_prefill", "attn_residual", "vision"),
    *("decode_step", "prefill_pass"),
)


def run(op: str, device: str) -> None:
    """In its own process: Triton reads TRITON_INTERPRET when it is imported."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-W", "ignore:overflow:RuntimeWarning", str(CHECK), op, device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("check_") >= 1


@pytest.mark.parametrize("op", OPS)
def test_kernel_is_its_reference_in_the_interpreter(op: str) -> None:
    pytest.importorskip("triton")
    run(op, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_kernel_is_its_reference_on_the_device(op: str) -> None:
    run(op, "cuda")
