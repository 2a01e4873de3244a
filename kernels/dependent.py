"""Launches that begin before the one in front of them has ended (programmatic dependent launch).

A kernel launched with ``launch_pdl`` may start once every program of the launch before it in the
stream has called :func:`let_next_begin` or ended. It must call :func:`wait_for_inputs`, all its
programs, before it reads what earlier launches wrote and before it writes anything; what is before
that call runs beside the earlier launch. Weights may be asked for there, into the L2 cache only
(:func:`ask_for`): that reads nothing, so nothing can be read too early. Every launch in a chain
waits, so whoever has waited finds the results of all before it.

One launch writes before it waits: KDA's parallel kernel beside the walk (``kda/gpu.py``). What is
in front of the walk lets others begin behind its own wait, so all inputs are there; nobody else has
to do with what it writes; and its last program waits, for those behind it.

For recorded steps: their launches are short, and what lies between two of them is a good part.
"""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_joined: ContextVar[bool] = ContextVar("joined", default=False)


def begins_early(tensor: torch.Tensor) -> bool:
    """Whether a launch over a tensor may begin early: not on a CPU, not in :func:`after_all`."""
    return tensor.device.type != "cpu" and not _joined.get()


@contextmanager
def after_all() -> Iterator[None]:
    """Launches in here begin when all before them has ended: they join streams, or follow a fork.

    A launch with several others before it has no one launch that it could begin beside.
    """
    token = _joined.set(True)
    try:
        yield
    finally:
        _joined.reset(token)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Until the launches before this one have ended and their results can be seen."""
    if PDL:
        gdc_wait()


@triton.jit
def let_next_begin(PDL: tl.constexpr):
    """The next launch may take what room there is; it waits for this one's end by itself."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def ask_for(pointers, BYTES: tl.constexpr):
    """Have BYTES, a multiple of 16, behind each of some pointers brought to the L2 cache.

    Pointers are multiples of 16 bytes and valid for BYTES. Nothing is read: it is a hint.
    """
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [pointers, BYTES],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
