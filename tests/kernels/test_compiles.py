"""Every kernel compiles with the Triton that is installed, for Hopper, without a device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process import run_check

CHECK = Path(__file__).with_name("compile_check.py")


def test_every_kernel_compiles() -> None:
    pytest.importorskip("triton")
    assert "launches compiled" in run_check(CHECK, interpret=False)
