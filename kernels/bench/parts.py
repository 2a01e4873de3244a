"""Where the time of one call goes: every kernel of it by name and grid."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = 3
_AHEAD = 100_000_000
"""Clock cycles, some 50 ms: more than Python needs to queue the launches of all calls, traced."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Something that ran on the device; microseconds, ``gap`` of them nothing ran before it."""

    name: str
    grid: str
    begin: float
    took: float
    gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Equal launches of a call: how many, and the microseconds of all."""

    name: str
    grid: str
    count: float
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A call, in microseconds.

    Attributes:
        span: from its first launch to the end of its last one.
        idle: of that, nothing ran.
        parts: the longest first.
    """

    span: float
    idle: float
    parts: tuple[Part, ...]


def profile_call(work: Callable[[], object]) -> Profile:
    """Trace some calls that follow one another, launched ahead of the device."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        torch.cuda._sleep(_AHEAD)
        for _ in range(_CALLS):
            work()
        torch.cuda.synchronize()
    return summarise(events_of(profiler), _CALLS)


def events_of(profiler: profile) -> list[dict[str, Any]]:
    """Of a Chrome trace of what was profiled."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def launches_of(events: Iterable[dict[str, Any]]) -> list[Launch]:
    """What a Chrome trace says of the device, in order."""
    ran = sorted((e for e in events if e.get("cat") in ON_DEVICE), key=lambda e: e["ts"])
    launches, reached = [], ran[0]["ts"] if ran else 0.0
    for event in ran:
        grid = "x".join(map(str, event.get("args", {}).get("grid", ())))
        gap = max(0.0, event["ts"] - reached)
        launches.append(Launch(event["name"], grid, event["ts"], event["dur"], gap))
        reached = max(reached, event["ts"] + event["dur"])
    return launches


def summarise(events: Iterable[dict[str, Any]], calls: int) -> Profile:
    """Of a Chrome trace; times are of one of ``calls`` calls. The sleep before them is left out."""
    ran = launches_of(e for e in events if "spin_kernel" not in e.get("name", ""))
    sums: dict[tuple[str, str], list[float]] = {}
    for launch in ran:
        part = sums.setdefault((launch.name, launch.grid), [0, 0.0])
        part[0] += 1
        part[1] += launch.took
    idle = sum(launch.gap for launch in ran)
    span = max((launch.begin + launch.took for launch in ran), default=0.0)
    span -= ran[0].begin if ran else 0.0
    parts = [
        Part(name=name, grid=grid, count=count / calls, total=total / calls)
        for (name, grid), (count, total) in sums.items()
    ]
    parts.sort(key=lambda part: -part.total)
    return Profile(span=span / calls, idle=idle / calls, parts=tuple(parts))


def table(found: Profile, rows: int = 16) -> list[str]:
    """Lines to print: the longest parts, and what is left."""
    launches = sum(part.count for part in found.parts)
    lines = [
        f"    {found.span:.0f} us from the first of {launches:g} launches to the last's end, "
        f"nothing running {found.idle:.0f}"
    ]
    lines += [_line(part, part.total / found.span) for part in found.parts[:rows]]
    if rest := found.parts[rows:]:
        left = Part(
            name=f"{len(rest)} others",
            grid="",
            count=sum(part.count for part in rest),
            total=sum(part.total for part in rest),
        )
        lines.append(_line(left, left.total / found.span))
    return lines


def _line(part: Part, share: float) -> str:
    each = part.total / part.count
    name = shortened(part.name)
    return (
        f"    {part.total:9.1f} us {share:6.1%} {part.count:5g} x {each:8.2f}  {name} {part.grid}"
    )


def shortened(name: str) -> str:
    """A kernel's name without most of what C++ says of its types."""
    plain = name.removeprefix("void ").split("(", 1)[0]
    for word in ("at::native::", "(anonymous namespace)::"):
        plain = plain.replace(word, "")
    return plain if len(plain) <= 72 else plain[:48] + ".." + plain[-22:]
