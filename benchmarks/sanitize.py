"""Every Triton and Gluon kernel under compute-sanitizer, at the small odd shapes of its checks.

    python -m benchmarks.sanitize [--only racecheck] [--program compute-sanitizer]
        [--output benchmarks/results/sanitizer_h200.jsonl]

All kernels under ``memcheck`` and, but for ``UNSEEN``, ``racecheck``: one process for each check of
tests/kernels and tool, all at once. Every tensor has an allocation of its own with room behind it,
so that a read past its end is outside of everything. A line of results belongs to a kernel and a
tool; a kernel that no check has launched, and a check that did not finish, have none and are an
error.

``racecheck`` of Compute Sanitizer 2025.3 does not see all that orders warps: its later versions say
that they have fewer false reports of mbarriers (2025.4), of the synchronization of warp groups on
Hopper (2026.1) and of announced bytes (2026.3). The pairs of lines in ``EXPLAINED`` are ordered all
the same, by what is written there; a line of results counts them as ``explained``, apart from
errors. That a barrier of ours is not left out, tests/kernels/test_mla_hopper.py and
test_mla_turned.py check by taking each of them away. A newer tool can be given by ``--program``.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from k3vl.kernels.bench.about import append_lines, describe

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
CHECKS = ROOT / "tests" / "kernels"
_TRITON = (
    *("kda_decode", "kda_prefill", "kda_pieces"),
    *("mla_decode", "mla_prefill", "attn_residual", "vision"),
)
ALL = (
    *(("triton_check.py", op) for op in _TRITON),
    *(("moe_check.py", part) for part in ("odd", "few")),
    ("row_check.py",),
)
"""Checks that launch all kernels; those of a whole step launch no others, and record graphs."""
CHECKS_OF = {
    "memcheck": ALL,
    # The tool ends with an internal error in that check, whichever kernel it is to look at.
    "racecheck": tuple(check for check in ALL if check != ("moe_check.py", "odd")),
}
UNSEEN = {"racecheck": frozenset({"glu_kernel", "route_kernel"})}
"""Kernels that no other check launches: one has nothing in shared memory, one is Triton's alone."""
_EXCHANGED = "stored, met, told by an mbarrier, waited for by every thread that loads"
_HANDED_OVER = "Triton's hand-over to other groups of warps, which barriers of all warps enclose"
_ZEROED = "both groups of warps write the same: zeros behind the last key, the others as they are"
_SUM = "m_sum.index(SIDE).store(total)"
_EXCHANGE = (
    "the compiler's, with a barrier of all warps between each write of its room and each read"
)
_MLA, _FLASH, _WALK = (
    f"def {name}("
    for name in ("mla_decode_sides_kernel", "flash_hopper_kernel", "kda_walk_sides_kernel")
)
_SPLIT = "gl.warp_specialize("
_STORED = "piece.store(gl.where((o_n < left)[:, None], piece.load(LAYOUT), 0.0))"
_WALKS = "if SIDES == 1:"
_PEAK = "return core.reduce(input, axis, _elementwise_max, keep_dims=keep_dims)"
_HIGHER = "new = gl.maximum(old, gl.convert_layout(peak, FLAT))"
_LOWERED = "column = gl.convert_layout(kept, gl.SliceLayout(0, O))[None, :]"
EXPLAINED: dict[str, dict[tuple[str | None, str | None], str]] = {
    # What is written, what is read (as the compiler places it), and what orders them; None: written
    # as well.
    "mla_decode_sides_kernel": {
        ("m_max.index(0).store(higher)", "higher = gl.maximum(m_max.index(0).load(ROW), peak)"): (
            _EXCHANGED + "; the next store waits until the reader has told its own"
        ),
        ("m_max.index(1).store(higher)", "highest = m_max.index(1).load(ROW)"): (
            _EXCHANGED + "; the next store waits until the reader has told its next"
        ),
        (_SUM, "total = total + m_sum.index(1 - SIDE).load(ROW)"): _EXCHANGED,
        (
            _SUM,
            "share = gl.convert_layout(1.0 / gl.maximum(total, 1.0), ROW_O)[:, None]",
        ): _EXCHANGED,
        (_MLA, _MLA): _HANDED_OVER,
        (_SPLIT, _MLA): _HANDED_OVER,
    },
    "flash_hopper_kernel": {
        (_STORED, _STORED): _ZEROED,
        (_STORED, None): _ZEROED,
        (_FLASH, _FLASH): _HANDED_OVER,
        (_SPLIT, _FLASH): _HANDED_OVER,
    },
    "kda_walk_sides_kernel": {
        (_WALK, _WALK): _HANDED_OVER,
        (_SPLIT, _WALK): _HANDED_OVER,
        (_WALKS, _WALK): _HANDED_OVER,
    },
    "mla_decode_turned_kernel": {
        (
            "gl.inline_asm_elementwise(WEIGH, SOFTMAX_TYPES, [s[0], s[1], s[2], scale],",
            'return gl.inline_asm_elementwise(VERDICT, "=r", [], '
            "dtype=gl.int32, is_pure=False, pack=1)",
        ): "noted, fenced, met, read",
        **dict.fromkeys(
            [
                *((wrote, read) for wrote in (_PEAK, _LOWERED) for read in (_PEAK, _LOWERED)),
                *((_HIGHER, _HIGHER), (_LOWERED, _HIGHER)),
            ],
            _EXCHANGE,
        ),
    },
}
"""Reports of races that are none, by kernel: source lines of two accesses, and what orders them."""
LAUNCHED = "launched: "
REPORTED = 9
"""Status of a tool that has reported something, of a check that did not fail."""
_AT = re.compile(r"\bat (?:[\w ]* )?(\w+)(?:\(.*\))?\+0x")
_ACCESS = re.compile(r"(Read|Write) access at (\w+)\+0x\w+ in (\w+\.py):(\d+)")
_SUMMARIES = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazard"),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One check under one tool.

    Attributes:
        tool: of compute-sanitizer.
        check: script in tests/kernels, and the op where it has several.
        kernels: that the tool looks at; all else runs as it is.
    """

    tool: str
    check: tuple[str, ...]
    kernels: tuple[str, ...]

    def command(self, program: str, number: int, report: Path, device: str) -> list[str]:
        """The ``number``-th of those that run at once; the tool's words go to ``report``."""
        options = {
            "tool": self.tool,
            "error-exitcode": str(REPORTED),
            "target-processes": "application-only",  # not Triton's assembler
            "launch-timeout": "150",  # Python reaches CUDA late
            "port": str(49152 + 16 * number),  # a process tries ten
            "destroy-on-device-error": "kernel",  # one error does not hide the next
            "report-api-errors": "no",  # torch asks for what may not be there
            "log-file": str(report),
        }
        if self.tool == "memcheck":
            options["padding"] = "4096"
        else:
            options["print-limit"] = "0"  # a report behind the hundredth may be the real one
        flags = [word for name, value in options.items() for word in (f"--{name}", value)]
        chosen = [word for name in self.kernels for word in ("--kernel-name", f"kns={name}")]
        script, *ops = self.check
        inside = [sys.executable, "-m", "benchmarks.sanitize", "--inside", str(CHECKS / script)]
        return [program, *flags, *chosen, *inside, *ops, device, "small"]


@dataclass(frozen=True, slots=True)
class Result:
    """Of a run: launches, errors and explained reports by kernel, or why there are none."""

    launches: dict[str, int]
    errors: dict[str, int]
    explained: dict[str, int] = field(default_factory=dict)
    failure: str = ""


def all_kernels(root: Path = ROOT / "kernels") -> tuple[str, ...]:
    """Names of all functions that are launched, in Triton or in Gluon."""
    found = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                made = {ast.unparse(x).split("(")[0] for x in node.decorator_list}
                if made & {"triton.jit", "gluon.jit"}:
                    found.append(node.name)
    return tuple(found)


def inside(script: str, arguments: list[str]) -> None:
    """Run a check in this process, then say which kernels it launched, and how often."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    launches: Counter[str] = Counter()

    def counting(run: Any) -> Any:
        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            launches[self.__name__] += not kwargs["warmup"]
            return run(self, *args, **kwargs)

        return counted

    for kind in (JITFunction, InterpretedFunction):
        kind.run = counting(kind.run)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    print(LAUNCHED + json.dumps(launches), flush=True)


def read_report(
    tool: str, report: str, launches: dict[str, int], root: Path = ROOT / "kernels"
) -> tuple[dict[str, int], dict[str, int]]:
    """Errors by kernel, and reports that are explained.

    Errors that name none of the launched kernels count for each of them.

    Raises:
        ValueError: the report has no end.
    """
    summary = _SUMMARIES[tool].search(report)
    if summary is None:
        raise ValueError("the report has no summary")
    # A report is one block of lines; the first place in it is where the error is.
    blocks = re.split(r"^=+\s*$", report, flags=re.MULTILINE)
    found = [(place[1], block) for block in blocks if (place := _AT.search(block))]
    named = Counter(name for name, _ in found)
    why = Counter(name for name, block in found if tool == "racecheck" and explained(block, root))
    unnamed = max(0, int(summary[1]) - sum(named[name] for name in launches))
    errors = {name: named[name] - why[name] + unnamed for name in launches}
    return errors, {name: why[name] for name in launches if why[name]}


def explained(block: str, root: Path) -> bool:
    """Whether what a report says of its first access and each of the others is ``EXPLAINED``."""
    accesses = [
        (kind, kernel, source_line(root, kernel, file, int(number)))
        for kind, kernel, file, number in _ACCESS.findall(block)
    ]
    if len(accesses) < 2 or len(accesses) != block.count(" access at "):
        return False
    first, *others = accesses
    return all(_pair(first, other) in EXPLAINED.get(first[1], {}) for other in others)


_Access: TypeAlias = tuple[str, str, str | None]
"""How, by which kernel, in which line."""


def _pair(first: _Access, second: _Access) -> tuple[str | None, str | None]:
    """As a key of ``EXPLAINED``; of no key where two different lines write."""
    if first[1] != second[1]:
        return None, None
    if first[0] == second[0] == "Write":
        return (first[2], None) if first[2] == second[2] else (None, None)
    lines = {kind: line for kind, _, line in (first, second)}
    return lines.get("Write"), lines.get("Read")


def source_line(root: Path, kernel: str, file: str, number: int) -> str | None:
    """Without what is around it; None where there is no such line, or more than one such file.

    Of several, a kernel's is the one that it is in; what is none of ours is Triton's.
    """
    paths = list(root.rglob(file)) or _of_triton(file)
    texts = [path.read_text(encoding="utf-8") for path in paths]
    if len(texts) > 1:
        texts = [text for text in texts if f"def {kernel}(" in text]
    lines = texts[0].splitlines() if len(texts) == 1 else []
    return lines[number - 1].strip() if 0 < number <= len(lines) else None


def _of_triton(file: str) -> list[Path]:
    """A file of the language's own functions, such as maxima."""
    found = importlib.util.find_spec("triton")
    folders = found.submodule_search_locations if found else None
    return [x for folder in folders or () if (x := Path(folder, "language", file)).exists()]


def run_one(numbered: tuple[int, Run], *, program: str, device: str, timeout: float) -> Result:
    number, run = numbered
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.getenv("PYTHONPATH")])]),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report")
        command = run.command(program, number, report, device)
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            return Result({}, {}, failure=f"not done after {timeout:.0f} s")
        said = report.read_text(encoding="utf-8") if report.exists() else ""
    launched = [x for x in done.stdout.splitlines() if x.startswith(LAUNCHED)]
    told = f"status {done.returncode}\n{done.stdout[-1000:]}{done.stderr[-3000:]}{said[-3000:]}"
    if not launched:
        return Result({}, {}, failure=told)
    launches = json.loads(launched[-1].removeprefix(LAUNCHED))
    launches = {name: count for name, count in launches.items() if name in run.kernels and count}
    try:
        errors, known = read_report(run.tool, said, launches)
    except ValueError:
        return Result({}, {}, failure=told)
    if any(errors.values()):
        print(said, flush=True)
    elif done.returncode not in (0, REPORTED if known else 0):
        return Result({}, {}, failure=told)
    return Result(launches, errors, known)


def lines_of(runs: list[Run], results: list[Result]) -> list[dict[str, Any]]:
    """A line for each tool and kernel, over all checks that launch it."""
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for run, result in zip(runs, results, strict=True):
        for kernel, launches in result.launches.items():
            new = {"kernel": kernel, "tool": run.tool, "errors": 0, "launches": 0, "checks": []}
            line = lines.setdefault((run.tool, kernel), new)
            line["errors"] += result.errors[kernel]
            line["launches"] += launches
            if known := result.explained.get(kernel):
                line["explained"] = line.get("explained", 0) + known
            line["checks"].append(" ".join(run.check))
    return list(lines.values())


def sanitize(
    *, program: str, tools: Sequence[str], device: str, timeout: float, kernels: tuple[str, ...]
) -> tuple[list[Any], bool]:
    """Lines of results, and whether none is missing and all are without errors."""
    runs = [Run(tool, check, kernels) for tool in tools for check in CHECKS_OF[tool]]
    begun = time.monotonic()

    def one(numbered: tuple[int, Run]) -> Result:
        result = run_one(numbered, program=program, device=device, timeout=timeout)
        words = [numbered[1].tool, *numbered[1].check, "failed" if result.failure else "done"]
        print(*words, f"after {time.monotonic() - begun:.0f} s", flush=True)
        return result

    with ThreadPoolExecutor(max(1, len(runs))) as pool:
        results = list(pool.map(one, enumerate(runs)))
    lines = lines_of(runs, results)
    for run, result in zip(runs, results, strict=True):
        if result.failure:
            print(f"{run.tool} {' '.join(run.check)}: {result.failure}", flush=True)
    done = {(line["tool"], line["kernel"]) for line in lines}
    wanted = {(tool, name) for tool in tools for name in set(kernels) - UNSEEN.get(tool, set())}
    for tool, name in sorted(wanted - done):
        print(f"{tool}: nothing finished that launches {name}", flush=True)
    sound = done >= wanted and not any(result.failure for result in results)
    return lines, sound and not any(line["errors"] for line in lines)


def sanitizer_version(program: str) -> str:
    said = subprocess.run([program, "--version"], capture_output=True, text=True)
    found = re.search(r"Version (\S+)", said.stdout)
    return found[1] if found else "unknown"


def main() -> None:
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", choices=tuple(_SUMMARIES), default=tuple(_SUMMARIES))
    parser.add_argument("--program", default="compute-sanitizer")
    parser.add_argument("--timeout", type=float, default=540.0, help="seconds, of each process")
    parser.add_argument("--commit", help="of the code, where there is no repository")
    parser.add_argument("--output", type=Path, help="append JSON lines here")
    options = parser.parse_args()
    about = describe(torch.device(options.device), None, commit=options.commit)
    about["compute_sanitizer"] = sanitizer_version(options.program)
    lines, sound = sanitize(
        program=options.program,
        tools=options.only,
        device=options.device,
        timeout=options.timeout,
        kernels=all_kernels(),
    )
    for line in lines:
        print(json.dumps(line), flush=True)
    if options.output:
        append_lines(options.output, ({**about, **line} for line in lines))
    sys.exit(not sound)


if __name__ == "__main__":
    main()
