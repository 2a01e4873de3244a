"""What no network reaches: names of drawings by HOG, coarse colour and linear discriminants.

The floor of naming. It has an easier task than the model: it is given the drawing itself, cut out,
upright and in full size, where the model finds it in a picture. Features are histograms of oriented
gradients (Dalal and Triggs 2005, 8-pixel cells, 2 x 2 blocks, L2-Hys) of grey and of alpha, coarse
colour and coarse alpha; the classifier is linear discriminant analysis with a covariance shrunk
towards a multiple of the identity (Friedman 1989). numpy only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from k3vl.demo.atlas import MORE, TRAIN

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from k3vl.demo.atlas import Atlas, Sprite

_SIDE = 64
_CELL = 8
_BINS = 9
_SHRINK = 0.3
_CHUNK = 256


def hog(images: NDArray[np.floating]) -> NDArray[np.float32]:
    """[n, 64, 64] in 0..1 -> [n, 1764]."""
    down, across = np.zeros_like(images), np.zeros_like(images)
    down[:, 1:-1] = images[:, 2:] - images[:, :-2]
    across[:, :, 1:-1] = images[:, :, 2:] - images[:, :, :-2]
    strength = np.hypot(down, across)
    bins = (np.arctan2(down, across) % np.pi / np.pi * _BINS).astype(np.int64) % _BINS
    n, cells = len(images), _SIDE // _CELL
    histogram = np.stack(
        [
            (strength * (bins == b)).reshape(n, cells, _CELL, cells, _CELL).mean((2, 4))
            for b in range(_BINS)
        ],
        -1,
    )
    blocks = np.concatenate(
        [histogram[:, y : cells - 1 + y, x : cells - 1 + x] for y in (0, 1) for x in (0, 1)], -1
    )
    # L2-Hys: normalise, clip, normalise.
    for limit in (0.2, np.inf):
        length = np.sqrt((blocks**2).sum(-1, keepdims=True) + 1e-10)
        blocks = np.minimum(blocks / length, limit)
    return blocks.reshape(n, -1).astype(np.float32)


def features(drawings: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[n, h, w, 4] RGBA -> [n, 3700], the drawing on white."""
    return np.concatenate(
        [_features(drawings[i : i + _CHUNK]) for i in range(0, len(drawings), _CHUNK)]
    )


def _features(drawings: NDArray[np.uint8]) -> NDArray[np.float32]:
    size, box = (_SIDE, _SIDE), Image.Resampling.BOX
    small = np.stack([np.asarray(Image.fromarray(d).resize(size, box)) for d in drawings])
    alpha = small[..., 3].astype(np.float32) / 255
    rgb = small[..., :3].astype(np.float32) / 255 * alpha[..., None] + 1 - alpha[..., None]
    n = len(drawings)
    colour = rgb.reshape(n, 8, 8, 8, 8, 3).mean((2, 4)).reshape(n, -1)
    shape = alpha.reshape(n, 8, 8, 8, 8).mean((2, 4)).reshape(n, -1)
    grey = rgb.mean(-1)
    parts = (hog(grey), 0.7 * hog(alpha), 0.6 * (colour - 0.7), 0.8 * shape)
    return np.concatenate(parts, 1).astype(np.float32)


class NameFloor:
    """Discriminants of all names, learned from the training drawings and their mirror images.

    Args:
        atlas: its training sprites that are not held out are learned; all that anything is
            measured on get an answer.
    """

    def __init__(self, atlas: Atlas) -> None:
        # Further drawings come last in an atlas, so indices stay what they are.
        atlas = replace(atlas, sprites=tuple(s for s in atlas.sprites if s.style != MORE))
        drawings = atlas.pixels()
        x = features(drawings)
        own = [i for i, s in enumerate(atlas.sprites) if s.style == TRAIN and i not in atlas.held]
        learned = np.concatenate([x[own], features(drawings[own][:, :, ::-1])])
        names = np.tile([atlas.sprites[i].name for i in own], 2)
        guessed = _discriminate(learned, names, x)
        self._names = dict(zip(atlas.sprites, guessed.tolist(), strict=True))

    def name(self, sprite: Sprite) -> int:
        """Name index that a drawing of the atlas is taken for."""
        return self._names[sprite]


def _discriminate(
    learned: NDArray[np.float32], labels: NDArray[np.int64], x: NDArray[np.float32]
) -> NDArray[np.int64]:
    """Linear discriminant analysis: [n, d] with [n] labels -> labels of [m, d]."""
    centre = learned.mean(0)
    learned = learned - centre
    classes, index = np.unique(labels, return_inverse=True)
    means = np.zeros((len(classes), learned.shape[1]))
    np.add.at(means, index, learned)
    means /= np.bincount(index)[:, None]
    rest = learned - means[index].astype(np.float32)
    within = (rest.T @ rest).astype(np.float64) / len(rest)
    within.flat[:: len(within) + 1] += _SHRINK * np.trace(within) / len(within)
    weights = np.linalg.solve(within, means.T)
    bias = -0.5 * (means.T * weights).sum(0)
    return classes[np.argmax((x - centre) @ weights + bias, 1)]
