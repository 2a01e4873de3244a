"""Which recorded lines the tables of the documents are made of.

Of every case the newest line counts: of ours, and of each peer that was timed at the same shape.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
OURS = "k3vl"
SLICES = "k3vl, triton kernels"
PEERS = (
    (r"fla \S+ .*chunk_kda \(no", "fla without convolution and norm"),
    (r"fla \S+ causal_conv1d", "fla"),
    (r"fla \S+ fused_recurrent", "fla without convolution and norm"),
    (r"SGLang \S+ chunk_kda \(no", "SGLang without convolution and norm"),
    (r"SGLang \S+ FlashMLA", "FlashMLA"),
    (r"SGLang \S+ Triton .* over cached latents", "SGLang's Triton over latents"),
    (r"SGLang \S+ Triton", "SGLang's Triton"),
    (r"SGLang \S+ fused_marlin_moe", "Marlin"),
    (r"SGLang \S+ kda_fused_decode", "SGLang's fused kernel"),
    (r"SGLang \S+ .*, positions and lengths made before", "SGLang, positions made before"),
    (r"SGLang", "SGLang"),
    (r"PyTorch grouped_mm", "PyTorch, bfloat16, no sum, no norm"),
    (r"PyTorch (?!reference)", "PyTorch"),
)
"""How a table calls an implementation, by what its name begins with; the rest is not shown."""


class MissingLineError(Exception):
    """A table wants a case that nobody has recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A case in a table.

    Attributes:
        label: what the reader sees.
        op, shape: of the lines; ``shape`` is its beginning.
        goal: times as fast as ``against``, the table's name of a peer.
        share: of the limit, that was wanted.
        run: commit of the run that timed us beside ``against``, where a newer line stands alone.
        instead: by commit, what was then a variant and is now our default.
        apart: why a peer is no comparison.
    """

    label: str
    op: str
    shape: str
    against: str = "SGLang"
    goal: float | None = None
    share: float | None = None
    run: str | None = None
    instead: dict[str, str] = field(default_factory=dict)
    apart: str = ""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another implementation's newest line, ``name`` as tables call it."""

    name: str
    us: float
    of_limit: float
    commit: str
    comparable: bool


@dataclass(frozen=True, slots=True)
class Found:
    """A row with its lines: ours and the peers', the one it is compared with first."""

    row: Row
    line: dict[str, Any]
    peers: tuple[Peer, ...]

    @property
    def ratio(self) -> float | None:
        """How many times as fast we are; None where nobody comparable was timed."""
        first = self.peers[0] if self.peers else None
        if first is None or first.name != self.row.against or not first.comparable:
            return None
        return first.us / self.line["median_us"]

    @property
    def verdict(self) -> str:
        """The goal, and whether it is reached by the numbers as they are recorded."""
        wanted, reached = [], []
        if self.row.goal is not None:
            wanted.append(f"{self.row.goal:g}x")
            reached.append(None if self.ratio is None else self.ratio >= self.row.goal)
        if self.row.share is not None:
            wanted.append(f"{self.row.share:.0%}".replace("%", " %"))
            reached.append(self.line["of_limit"] >= self.row.share)
        if not wanted:
            return "-"
        end = "**missed**" if False in reached else "open" if None in reached else "reached"
        return f"{', '.join(wanted)}: {end}"


def read_lines(name: str, results: Path = RESULTS) -> list[dict[str, Any]]:
    """Of a file of results, oldest first."""
    text = (results / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def newest(
    lines: list[dict[str, Any]], op: str, shape: str, implementation: str, commit: str | None = None
) -> dict[str, Any]:
    """The last line of a case, at any commit or at one.

    Raises:
        MissingLineError: there is none.
    """
    for line in reversed(lines):
        same = line["op"] == op and line["implementation"] == implementation
        if same and line["shape"].startswith(shape) and commit in {None, line["commit"]}:
            return line
    raise MissingLineError(f"no line of {op}, {shape}..., {implementation}, {commit or 'any'}")


def find(lines: list[dict[str, Any]], row: Row, ours: str = OURS) -> Found:
    """A row's lines."""
    line = newest(lines, row.op, row.shape, ours, row.run)
    variant = row.instead.get(line["commit"])
    if variant:
        line = newest(lines, row.op, row.shape, variant, line["commit"])
    others = [x for x in lines if (x["op"], x["shape"]) == (row.op, line["shape"])]
    last = {name: x for x in others if (name := short(x["implementation"]))}
    peers = [_peer(name, x, row) for name, x in last.items()]
    if line.get("published_us") and "SGLang" not in last:
        us = line["published_us"]
        share = line["of_limit"] * line["median_us"] / us
        peers.append(Peer("SGLang", us, share, line["commit"], not row.apart))
    peers.sort(key=lambda peer: peer.name != row.against)
    return Found(row, line, tuple(peers))


def short(implementation: str) -> str:
    """What a table calls a peer; nothing for our own and for what no table shows."""
    return next((name for start, name in PEERS if re.match(start, implementation)), "")


def _peer(name: str, line: dict[str, Any], row: Row) -> Peer:
    comparable = line.get("agrees") is not False and not row.apart
    return Peer(name, line["median_us"], line["of_limit"], line["commit"], comparable)
