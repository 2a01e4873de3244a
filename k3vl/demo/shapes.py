"""The twelve coloured shapes as alpha masks, computed from their outlines."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from k3vl.demo.atlas import CELL, SHAPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

_OVERSAMPLE = 4


def shape_masks() -> NDArray[np.float32]:
    """[12, 96, 96] alpha in 0..1, in the order of ``atlas.SHAPES``."""
    n = CELL * _OVERSAMPLE
    y, x = np.meshgrid(np.linspace(-1, 1, n), np.linspace(-1, 1, n), indexing="ij")
    radius, angle = np.hypot(x, y), np.arctan2(y, x)

    def polygon(corners: int, turn: float) -> NDArray[np.float64]:
        """Distance from the centre to the edge of a regular polygon in every direction."""
        inner = ((angle + turn) % (2 * math.pi / corners)) - math.pi / corners
        return math.cos(math.pi / corners) / np.cos(inner)

    # A five-pointed star: in each tenth of the circle the edge runs from a tip to an inner corner.
    tenth = np.abs((angle + math.pi / 2) % (2 * math.pi / 5) - math.pi / 5)
    tip, notch = math.pi / 5, 0.38
    edge = notch * math.sin(tip) / np.maximum(notch * np.sin(tenth) + np.sin(tip - tenth), 1e-6)
    masks = {
        "circle": radius < 0.92,
        "square": np.maximum(abs(x), abs(y)) < 0.82,
        "triangle": radius < 0.95 * polygon(3, math.pi / 2),
        "diamond": abs(x) + abs(y) < 0.95,
        "pentagon": radius < 0.95 * polygon(5, math.pi / 2),
        "hexagon": radius < 0.95 * polygon(6, 0),
        "ring": (radius < 0.92) & (radius > 0.55),
        "cross": (np.minimum(abs(x), abs(y)) < 0.3) & (np.maximum(abs(x), abs(y)) < 0.9),
        "star": radius < 0.95 * edge,
        "heart": (x * 1.2) ** 2 + ((0.15 - y) * 1.15 - 0.75 * np.sqrt(abs(x * 1.2)) + 0.25) ** 2
        < 0.62,
        "crescent": (radius < 0.92) & (np.hypot(x - 0.4, y) > 0.75),
        "rectangle": (abs(x) < 0.92) & (abs(y) < 0.5),
    }
    fine = np.stack([masks[name] for name in SHAPES]).astype(np.float32)
    return fine.reshape(-1, CELL, _OVERSAMPLE, CELL, _OVERSAMPLE).mean((2, 4))
