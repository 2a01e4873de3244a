"""What ``k3vl doctor`` prints: versions, the device, and which kernels were chosen and why."""

from __future__ import annotations

import platform

import click
import psutil
import torch

from k3vl import __version__
from k3vl.kernels.choice import choose
from k3vl.load import Device, available_memory, choose_device

GIB = 2**30


def diagnose(device: Device) -> None:
    """Print a line each of versions, device and kernels.

    Raises:
        ConfigError: there is no such device.
    """
    where, dtype = choose_device(device)
    kernels = choose(where, dtype)
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else platform.machine()
    click.echo(f"k3vl {__version__}, Python {platform.python_version()}, torch {torch.__version__}")
    click.echo(
        f"device: {where.type} ({name}), {name_of(dtype)} weights, "
        f"{available_memory(where) / GIB:.1f} GiB free, {psutil.cpu_count()} CPU cores"
    )
    click.echo(f"kernels: {kernels.name}, because {kernels.reason}")
    form = "stay in 4 bits" if "mxfp4" in kernels.kept else f"are decoded to {name_of(dtype)}"
    click.echo(f"experts of an MXFP4 checkpoint: {form}")


def name_of(dtype: torch.dtype) -> str:
    """Of a dtype, without its module."""
    return str(dtype).removeprefix("torch.")
