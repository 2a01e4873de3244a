"""Products of one row and what is between them: interpreted here, compiled with ``-m gpu``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process import run_check

CHECK = Path(__file__).with_name("row_check.py")


def test_a_row_times_a_matrix_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert run_check(CHECK, "cpu", interpret=True).count("check_") == 7


@pytest.mark.gpu
def test_a_row_times_a_matrix_on_the_device() -> None:
    assert run_check(CHECK, "cuda", interpret=False).count("check_") == 14
