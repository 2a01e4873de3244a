"""The table that ``k3vl eval`` prints, and the JSON that it writes."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from k3vl import __version__
from k3vl.app.evaluation.scores import LESS_IS_BETTER
from k3vl.config import checkpoint_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from k3vl.app.evaluation.run import Row
    from k3vl.app.evaluation.scores import Value

_AS_RATIO = frozenset({"f1", "cer"})


def table(rows: Sequence[Row]) -> Table:
    """All rows; a column for each baseline that any of them has."""
    out = Table(box=SIMPLE_HEAD, pad_edge=False)
    out.add_column("split", no_wrap=True)
    out.add_column("metric", no_wrap=True)
    out.add_column("n", justify="right")
    out.add_column("model", justify="right")
    out.add_column("95 % interval", justify="right", no_wrap=True)
    names = list(dict.fromkeys(name for row in rows for name in row.baselines))
    for name in names:
        out.add_column(name, justify="right")
    last = None
    for row in rows:
        value = row.value
        cells = [
            row.split if row.split != last else "",
            row.metric + (" (less is better)" if row.metric in LESS_IS_BETTER else ""),
            str(value.n),
            figure(row.metric, value.value),
            interval(row.metric, value),
        ]
        cells += [
            figure(row.metric, row.baselines[name].value) if name in row.baselines else "-"
            for name in names
        ]
        out.add_row(*cells)
        last = row.split
    return out


def figure(metric: str, value: float) -> str:
    """A value as it is printed: shares in per cent, F1 and CER as ratios."""
    return f"{value:.3f}" if metric in _AS_RATIO else f"{100 * value:.1f} %"


def interval(metric: str, value: Value) -> str:
    """The ends of an interval, as :func:`figure`."""
    if metric in _AS_RATIO:
        return f"{value.low:.3f}-{value.high:.3f}"
    return f"{100 * value.low:.1f}-{100 * value.high:.1f}"


def provenance(checkpoint: str) -> dict[str, Any]:
    """What was measured, with what: weights by their SHA-256, versions, machine."""
    directory = checkpoint_path(checkpoint)
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return {
        "model": checkpoint,
        "weights_sha256": digest.hexdigest(),
        "versions": {
            "k3vl": __version__,
            "torch": version("torch"),
            "python": platform.python_version(),
        },
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
    }


def seconds_text(seconds: Mapping[str, float]) -> str:
    """Where the time went, on one line."""
    return ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
