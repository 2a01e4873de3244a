"""The tower's kernels: interpreted here, compiled on a CUDA device (``-m gpu``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process import run_check

CHECK = Path(__file__).with_name("vision_check.py")


def run(device: str) -> None:
    assert "checked" in run_check(CHECK, device, interpret=device == "cpu")


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run("cpu")


@pytest.mark.gpu
def test_on_the_device() -> None:
    pytest.importorskip("triton")
    run("cuda")
