"""The nine places of a picture, in words."""

from __future__ import annotations

_LOW, _HIGH = 0.38, 0.62
# A centre closer than this to a border between two places could be called either, and of two
# centres closer than this either could be called the first from the left.
_MARGIN = 0.025


def place(x: float, y: float) -> str:
    """One of nine places: ``top left``, ``left``, ``center``, ..."""
    across = "left" if x < _LOW else "right" if x > _HIGH else ""
    down = "top" if y < _LOW else "bottom" if y > _HIGH else ""
    return f"{down} {across}".strip() or "center"


def is_clear(x: float, y: float) -> bool:
    """Whether the place is beyond doubt."""
    return all(abs(v - edge) > _MARGIN for v in (x, y) for edge in (_LOW, _HIGH))


def is_apart(a: float, b: float) -> bool:
    """Whether it is beyond doubt which of two centres lies further left."""
    return abs(a - b) > _MARGIN
