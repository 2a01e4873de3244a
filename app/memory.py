"""What the C library does with freed memory."""

from __future__ import annotations

import ctypes
import sys

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_LARGE = 1 << 20


def return_large_blocks() -> None:
    """Have blocks of a mebibyte or more be mappings of their own, here and now.

    They then grow without a copy and go back to the system when they are freed. Left to itself
    glibc raises the size from which that holds to that of the largest block freed so far, and the
    bodies of requests leave holes that count as the server's memory. Without glibc: nothing.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
