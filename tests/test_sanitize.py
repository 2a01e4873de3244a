"""``benchmarks/sanitize.py`` with a ``compute-sanitizer`` that only starts what it is given."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks import sanitize
from benchmarks.sanitize import Result, Run, all_kernels, lines_of, read_report

if TYPE_CHECKING:
    from pathlib import Path

FAKE = f"""#!{sys.executable}
import os, subprocess, sys
if sys.argv[1] == "--version":
    sys.exit(print("Version 2025.3.1.0 (build 1)"))
options = {{}}
words = sys.argv[1:]
while words[0].startswith("--"):
    name, value, *words = words
    options.setdefault(name, []).append(value)
assert options["--kernel-name"] == ["kns=attn_residual_kernel"], options
assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
done = subprocess.run(words)
with open(options["--log-file"][0], "w") as file:
    file.write(os.environ["REPORT"])
sys.exit(done.returncode or 9 * ("SUMMARY: 0" not in os.environ["REPORT"]))
"""

BAD = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at attn_residual_kernel+0x1a0 in mix_kernel.py:31
=========     by thread (3,0,0) in block (0,0,0)
=========     Access at 0x7f is out of bounds
=========
========= Invalid __global__ write of size 16 bytes
=========     at void other_kernel(float *, int)+0x60 in mix_kernel.py:31
=========     Host Frame: at attn_residual_kernel+0x12
=========
========= ERROR SUMMARY: 3 errors
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(sanitize, "MEMORY", (("triton_check.py", "attn_residual"),))
    monkeypatch.setattr(sanitize, "RACES", ())
    monkeypatch.setattr(sanitize, "all_kernels", lambda: {"attn_residual_kernel": "triton"})

    def started(report: str) -> tuple[int, list[dict[str, object]]]:
        monkeypatch.setenv("REPORT", report)
        output = tmp_path / "lines.jsonl"
        command = ["sanitize", "--device", "cpu", "--commit", "abc", "--output", str(output)]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as end:
            sanitize.main()
        lines = output.read_text().splitlines() if output.exists() else []
        return int(end.value.code or 0), [json.loads(line) for line in lines]

    return started


def test_a_kernel_without_errors(start) -> None:
    pytest.importorskip("triton")
    status, (line,) = start("========= ERROR SUMMARY: 0 errors\n")
    assert status == 0
    assert line["launches"] == 6
    of_a_run = {"commit": "abc", "compute_sanitizer": "2025.3.1.0", "tool": "memcheck"}
    assert line.items() >= of_a_run.items()
    assert (line["kernel"], line["errors"]) == ("attn_residual_kernel", 0)
    assert line["checks"] == ["triton_check.py attn_residual"]
    assert {"torch", "triton", "device", "date"} <= line.keys()


def test_errors_are_counted_and_shown(start, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    status, (line,) = start(BAD)
    assert status == 1
    assert line["errors"] == 3, "one names it, two nobody that was launched"
    assert "Invalid __global__ read" in capsys.readouterr().out


def test_a_check_that_does_not_finish_has_no_line(
    start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(sanitize, "MEMORY", (("triton_check.py", "no such op"),))
    assert start("========= ERROR SUMMARY: 0 errors\n") == (1, [])
    said = capsys.readouterr().out
    assert "KeyError: 'no such op'" in said
    assert "nothing finished that launches attn_residual_kernel" in said


def test_a_report_that_breaks_off_is_no_result(start) -> None:
    pytest.importorskip("triton")
    assert start("========= COMPUTE-SANITIZER\n") == (1, [])


def test_whose_errors_they_are() -> None:
    assert read_report("memcheck", BAD, {"attn_residual_kernel": 1, "other_kernel": 2}) == {
        "attn_residual_kernel": 2,
        "other_kernel": 2,
    }
    race = (
        "========= Error: Race reported between Write access at a_kernel+0x10 in a.py:3\n"
        "=========     and Read access at a_kernel+0x40 in a.py:9 [64 hazards]\n"
        "=========\n"
        "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
    )
    assert read_report("racecheck", race, {"a_kernel": 1, "b_kernel": 1}) == {
        "a_kernel": 1,
        "b_kernel": 0,
    }


def test_a_kernel_of_several_checks_has_one_line_a_tool() -> None:
    runs = [
        Run("memcheck", ("a.py", "x"), ("k",)),
        Run("memcheck", ("b.py",), ("k",)),
        Run("racecheck", ("b.py",), ("k",)),
    ]
    results = [Result({"k": 2}, {"k": 1}), Result({"k": 3}, {"k": 0}), Result({"k": 1}, {"k": 0})]
    first, second = lines_of(runs, results)
    assert first == {
        "kernel": "k", "tool": "memcheck", "errors": 1, "launches": 5, "checks": ["a.py x", "b.py"],
    }  # fmt: skip
    assert (second["tool"], second["launches"]) == ("racecheck", 1)


def test_kernels_are_found_in_the_source() -> None:
    found = all_kernels()
    assert found["mla_decode_sides_kernel"] == "gluon"
    assert found["flash_kernel"] == found["pixel_kernel"] == "triton"
    assert len(found) >= 20
