"""``benchmarks/sanitize.py`` with a ``compute-sanitizer`` that only starts what it is given."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks import sanitize
from benchmarks.sanitize import (
    EXPLAINED,
    Result,
    Run,
    all_kernels,
    explained,
    lines_of,
    read_report,
)

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
# Not in the test's process, whose Triton would be the interpreter's from then on.
done = subprocess.run(words, env={{**os.environ, "TRITON_INTERPRET": "1"}})
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
    checks = (("triton_check.py", "attn_residual"),)
    monkeypatch.setattr(sanitize, "CHECKS_OF", dict.fromkeys(("memcheck", "racecheck"), checks))
    monkeypatch.setattr(sanitize, "all_kernels", lambda: ("attn_residual_kernel",))

    def started(report: str, tool: str = "memcheck") -> tuple[int, list[dict[str, object]]]:
        monkeypatch.setenv("REPORT", report)
        output = tmp_path / "lines.jsonl"
        command = ["sanitize", "--device", "cpu", "--commit", "abc", "--output", str(output)]
        command += ["--only", tool]
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
    assert line["launches"] == 24
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
    monkeypatch.setitem(sanitize.CHECKS_OF, "memcheck", (("triton_check.py", "no such op"),))
    assert start("========= ERROR SUMMARY: 0 errors\n") == (1, [])
    said = capsys.readouterr().out
    assert "KeyError: 'no such op'" in said
    assert "nothing finished that launches attn_residual_kernel" in said


def test_a_report_that_breaks_off_is_no_result(start) -> None:
    pytest.importorskip("triton")
    assert start("========= COMPUTE-SANITIZER\n") == (1, [])


def test_whose_errors_they_are() -> None:
    launched = {"attn_residual_kernel": 1, "other_kernel": 2}
    errors = {"attn_residual_kernel": 2, "other_kernel": 2}
    assert read_report("memcheck", BAD, launched) == (errors, {})
    race = (
        "========= Error: Race reported between Write access at a_kernel+0x10 in a.py:3\n"
        "=========     and Read access at a_kernel+0x40 in a.py:9 [64 hazards]\n"
        "=========\n"
        "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
    )
    errors = {"a_kernel": 1, "b_kernel": 0}
    assert read_report("racecheck", race, {"a_kernel": 1, "b_kernel": 1}) == (errors, {})


def test_races_that_are_none_are_known_by_what_their_lines_say(tmp_path: Path) -> None:
    source = tmp_path / "kernels" / "mla" / "two.py"
    source.parent.mkdir(parents=True)
    known = list(EXPLAINED["mla_decode_sides_kernel"])
    (sum_, load), (kernel, _) = known[2], known[4]
    zeroed = next(iter(EXPLAINED["flash_hopper_kernel"]))[0]
    source.write_text(
        f"{kernel}\n    {sum_}\n    {load}\n  gl.warp_specialize(\n  x = 3\n  {zeroed}\n"
    )

    def block(*accesses: tuple[str, int], by: str = "mla_decode_sides_kernel") -> str:
        first, *others = [f"{how} access at {by}+0x1a in two.py:{line}" for how, line in accesses]
        lines = [f"Error: Race reported between {first}", *(f"    and {x} [9]" for x in others)]
        return "".join(f"========= {line}\n" for line in lines)

    for same in (
        block(("Write", 2), ("Read", 3)),
        block(("Read", 3), ("Write", 2)),
        block(("Read", 1), ("Write", 1), ("Write", 4)),
        block(("Write", 6), ("Write", 6), by="flash_hopper_kernel"),
        block(("Read", 6), ("Write", 6), by="flash_hopper_kernel"),
    ):
        assert explained(same, tmp_path)
    for other in (
        block(("Write", 2), ("Write", 2)),
        block(("Write", 3), ("Read", 2)),
        block(("Write", 2), ("Read", 5)),
        block(("Write", 2), ("Read", 33)),
        block(("Read", 1), ("Write", 1), ("Write", 2)),
        block(("Write", 2), ("Read", 3)) + "=========     and Read access at elsewhere [9]\n",
        block(("Write", 2)),
        block(("Write", 2), ("Read", 3), by="flash_hopper_kernel"),
        block(("Write", 6), ("Write", 2), by="flash_hopper_kernel"),
        block(("Write", 6), ("Write", 6)),
    ):
        assert not explained(other, tmp_path)
    report = "=========\n".join(
        [
            block(("Write", 2), ("Read", 3)),
            block(("Write", 2), ("Read", 5)),
            "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n",
        ]
    )
    launched = {"mla_decode_sides_kernel": 1}
    assert read_report("racecheck", report, launched, tmp_path) == (launched, launched)
    (tmp_path / "two.py").write_text("x = 1\n" * 9)
    assert explained(block(("Write", 2), ("Read", 3)), tmp_path), "another kernel's file"
    (tmp_path / "two.py").write_text(source.read_text())
    assert not explained(block(("Write", 2), ("Read", 3)), tmp_path), "which file?"


def test_what_is_explained_is_in_the_source() -> None:
    """In that of its kernel, once; but for one of Triton's own."""
    pytest.importorskip("triton")
    (standard,) = sanitize._of_triton("standard.py")
    theirs = [line.strip() for line in standard.read_text(encoding="utf-8").splitlines()]
    assert sanitize._PEAK in theirs
    paths = list((sanitize.ROOT / "kernels").rglob("*.py"))
    for kernel, pairs in EXPLAINED.items():
        (text,) = (t for p in paths if f"def {kernel}(" in (t := p.read_text(encoding="utf-8")))
        lines = [line.strip() for line in text.splitlines()]
        for line in {line for pair in pairs for line in pair} - {None, sanitize._PEAK}:
            both = kernel == "kda_walk_sides_kernel" and line.startswith("gl.warp_specialize")
            assert lines.count(line) == 1 + both, line


def test_explained_reports_are_counted_apart(
    start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(sanitize, "explained", lambda block, _: "+0x10" in block)
    race = (
        "========= Error: Race reported between Write access at attn_residual_kernel+{} in a.py:3\n"
        "=========     and Read access at attn_residual_kernel+0x40 in a.py:9 [64 hazards]\n"
        "=========\n"
    )
    end = "========= RACECHECK SUMMARY: {0} hazards displayed ({0} errors, 0 warnings)\n"
    status, (line,) = start(2 * race.format("0x10") + end.format(2), "racecheck")
    assert (status, line["errors"], line["explained"]) == (0, 0, 2)
    status, lines = start(race.format("0x10") + race.format("0x20") + end.format(2), "racecheck")
    assert (status, lines[-1]["errors"], lines[-1]["explained"]) == (1, 1, 1)


def test_a_kernel_of_several_checks_has_one_line_a_tool() -> None:
    runs = [
        Run("memcheck", ("a.py", "x"), ("k",)),
        Run("memcheck", ("b.py",), ("k",)),
        Run("racecheck", ("b.py",), ("k",)),
    ]
    results = [
        Result({"k": 2}, {"k": 1}),
        Result({"k": 3}, {"k": 0}),
        Result({"k": 1}, {"k": 0}, {"k": 4}),
    ]
    first, second = lines_of(runs, results)
    assert first == {
        "kernel": "k", "tool": "memcheck", "errors": 1, "launches": 5, "checks": ["a.py x", "b.py"],
    }  # fmt: skip
    assert (second["tool"], second["launches"], second["explained"]) == ("racecheck", 1, 4)


def test_kernels_are_found_in_the_source() -> None:
    found = all_kernels()
    assert {"mla_decode_sides_kernel", "flash_kernel", "pixel_kernel"} < set(found)
    assert len(found) >= 20
    assert set().union(*sanitize.UNSEEN.values()) < set(found)
