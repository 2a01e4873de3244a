"""What every line of results says about where it comes from."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from k3vl.kernels.bench.timing import Ceilings


def describe(
    device: torch.device, ceilings: Ceilings | None, *, commit: str | None = None
) -> dict[str, Any]:
    """Commit, date, device, versions, and the device's measured limits.

    Args:
        device: that is measured.
        ceilings: of it, where they are known.
        commit: of the code, where there is no repository.
    """
    cuda = device.type == "cuda"
    about: dict[str, Any] = {
        "commit": commit or _commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "torch": torch.__version__,
        "triton": _triton(),
    }
    if ceilings:
        about["copy_tb_s"] = round(ceilings.bandwidth / 1e12, 3)
        product = "bf16_tflop_s" if cuda else "float32_tflop_s"
        about[product] = round(ceilings.flops / 1e12, 1 if cuda else 4)
    return about


def append_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Append results to a file of JSON lines, which may not be there yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def _triton() -> str | None:
    try:
        return version("triton")
    except PackageNotFoundError:
        return None
