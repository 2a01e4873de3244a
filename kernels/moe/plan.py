"""Which token goes to which expert, as lists that a grouped matrix product walks.

(token, choice) pairs are sorted by expert, and every expert's run is cut into tiles: as many of
128 pairs as fit, and the rest in the narrowest tile that holds it. A rest of up to 32 behind a full
tile joins it (width 160): the weights of an expert with 146 tokens are then read and decoded once.
Other widths can be asked for.
Nothing here waits for the device: lists have the length of the worst case, and a count says how
much of them is valid.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

FULL, JOINED, EIGHT = 128, 32, 8
WIDTHS = (16, 32, 64, FULL, FULL + JOINED)
"""Tile widths in pairs. Full tiles may be repeated, of the others an expert has at most one.

Where the first of them is EIGHT in place of 16, 9 to 16 pairs are two tiles.
"""

FINE_WIDTHS = (16, 32, 48, 64, 80, 96, FULL, FULL + 16, FULL + 32, FULL + 64)
"""The same with less left empty: each is a power of two, or the sum of two."""

SMALL_WIDTHS, SMALL_FULL = (16, 32, 48, 64, 80, 96), 80
"""With these, tiles of 80 are repeated, and 96 has a rest of up to 16."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tiles:
    """The tiles of one width.

    Attributes:
        expert: [M] int32, expert of every tile; M bounds the worst case.
        first: [M] int32, the tile's first place in ``ExpertPlan.order``.
        end: [M] int32, where the expert's run ends there.
        count: [] int32, how many tiles there are.
    """

    expert: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor
    count: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertPlan:
    """Sorted pairs and their tiles.

    Attributes:
        order: [N k] int32, pairs (token * k + choice) in the order of their experts; stable.
        tiles: by width; a width that cannot occur is missing.
    """

    order: torch.Tensor
    tiles: dict[int, Tiles]

    def lists(self, width: int) -> tuple[torch.Tensor, ...]:
        """What a grouped product reads for its tiles of a width."""
        tiles = self.tiles[width]
        return self.order, tiles.expert, tiles.first, tiles.end, tiles.count


def most_tiles(
    tokens: int,
    top_k: int,
    experts: int,
    narrow: int = 16,
    widths: tuple[int, ...] = WIDTHS,
    full: int = FULL,
) -> dict[int, int]:
    """How many tiles of a width there can be; widths without any are missing.

    A token's choices differ, so an expert has no more pairs than there are tokens.
    """
    pairs = tokens * top_k
    twice = min(experts, pairs // 9) if narrow < 16 else 0
    bounds = {narrow: (1, min(experts, pairs) + twice)}
    for less, width in pairwise(widths):
        bounds[width] = (less + 1, min(experts, pairs // (less + 1)))
    bounds[full] = (bounds[full][0], bounds[full][1] + pairs // full)
    return {width: bound for width, (least, bound) in bounds.items() if bound and tokens >= least}


def tiles_of(
    counts: torch.Tensor, narrow: int = 16, widths: tuple[int, ...] = WIDTHS, full: int = FULL
) -> dict[int, torch.Tensor]:
    """Tiles of every width that experts with so many pairs need, each shaped as ``counts``."""
    whole, rest = counts // full, counts % full
    joined = (whole > 0) & (rest > 0) & (rest <= widths[-1] - full)
    rest = rest + joined * full
    tiles = {narrow: ((rest > 0) & (rest <= 16)).to(counts) * -(-rest // narrow)}
    for less, width in pairwise(widths):
        tiles[width] = ((rest > less) & (rest <= width)).to(counts)
    tiles[full] += whole - joined.to(counts)
    return tiles


def plan_experts(
    experts: torch.Tensor,
    num_experts: int,
    narrow: int = 16,
    widths: tuple[int, ...] = WIDTHS,
    full: int = FULL,
) -> ExpertPlan:
    """Sort pairs by expert and cut the runs into tiles.

    Args:
        experts: [N, k] integer indices, different ones in a row.
        num_experts: E.
        narrow: width of the first kind of tiles, 16 or EIGHT.
        widths: ascending from 16, ``full`` among them; above it are a full tile and a rest.
        full: width of the tiles that an expert may have several of.

    Returns:
        The plan, on the device of ``experts``; nothing waits for the device.
    """
    flat = experts.flatten()
    order = torch.argsort(flat, stable=True)
    every = torch.arange(num_experts + 1, device=flat.device)
    offsets = torch.searchsorted(flat[order], every.to(flat.dtype))
    counts = offsets.diff()
    tokens, top_k = experts.shape
    bounds = most_tiles(tokens, top_k, num_experts, narrow, widths, full)
    tiles = {}
    for width, needed in tiles_of(counts, narrow, widths, full).items():
        if width not in bounds:
            continue
        ends = needed.cumsum(0)
        at = torch.arange(bounds[width], device=flat.device)
        expert = torch.searchsorted(ends, at, right=True).clamp_(max=num_experts - 1)
        nth = at - (ends - needed)[expert]
        whole = counts[expert] // full
        if width > full:
            behind = (whole - 1) * full
        else:
            behind = nth * width if width in (EIGHT, full) else whole * full
        first = offsets[expert] + behind
        tiles[width] = Tiles(
            expert=expert.int(),
            first=first.int(),
            end=offsets[expert + 1].int(),
            count=ends[-1].int(),
        )
    return ExpertPlan(order=order.int(), tiles=tiles)
