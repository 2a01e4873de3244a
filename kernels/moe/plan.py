"""Which token goes to which expert, as lists that a grouped matrix product walks.

(token, choice) pairs are sorted by expert, and every expert's run is cut into tiles: as many of
128 pairs as fit, and the rest in the narrowest tile that holds it. A rest of up to 32 behind a full
tile joins it (width 160): the weights of an expert with 146 tokens are then read and decoded once.
Many pairs have finer widths. Nothing here waits for the device: lists have the length of the worst
case, and a count says how much of them is valid.
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
    tokens: int, top_k: int, experts: int, narrow: int = 16, widths: tuple[int, ...] = WIDTHS
) -> dict[int, int]:
    """How many tiles of a width there can be; widths without any are missing.

    A token's choices differ, so an expert has no more pairs than there are tokens.
    """
    pairs = tokens * top_k
    twice = min(experts, pairs // 9) if narrow < 16 else 0
    bounds = {narrow: (1, min(experts, pairs) + twice)}
    for less, width in pairwise(widths):
        bounds[width] = (less + 1, min(experts, pairs // (less + 1)))
    bounds[FULL] = (bounds[FULL][0], bounds[FULL][1] + pairs // FULL)
    return {width: bound for width, (least, bound) in bounds.items() if bound and tokens >= least}


def tiles_of(
    counts: torch.Tensor, narrow: int = 16, widths: tuple[int, ...] = WIDTHS
) -> dict[int, torch.Tensor]:
    """Tiles of every width that experts with so many pairs need, each shaped as ``counts``."""
    whole, rest = counts // FULL, counts % FULL
    joined = (whole > 0) & (rest > 0) & (rest <= widths[-1] - FULL)
    rest = rest + joined * FULL
    tiles = {narrow: ((rest > 0) & (rest <= 16)).to(counts) * -(-rest // narrow)}
    for less, width in pairwise(widths):
        tiles[width] = ((rest > less) & (rest <= width)).to(counts)
    tiles[FULL] += whole - joined.to(counts)
    return tiles


def plan_experts(
    experts: torch.Tensor,
    num_experts: int,
    narrow: int = 16,
    widths: tuple[int, ...] = WIDTHS,
) -> ExpertPlan:
    """Sort pairs by expert and cut the runs into tiles.

    Args:
        experts: [N, k] integer indices, different ones in a row.
        num_experts: E.
        narrow: width of the first kind of tiles, 16 or EIGHT.
        widths: ascending from 16, FULL among them; above it are a full tile and a rest.

    Returns:
        The plan, on the device of ``experts``; nothing waits for the device.
    """
    flat = experts.flatten()
    order = torch.argsort(flat, stable=True)
    every = torch.arange(num_experts + 1, device=flat.device)
    offsets = torch.searchsorted(flat[order], every.to(flat.dtype))
    counts = offsets.diff()
    tokens, top_k = experts.shape
    bounds = most_tiles(tokens, top_k, num_experts, narrow, widths)
    tiles = {}
    for width, needed in tiles_of(counts, narrow, widths).items():
        if width not in bounds:
            continue
        ends = needed.cumsum(0)
        at = torch.arange(bounds[width], device=flat.device)
        expert = torch.searchsorted(ends, at, right=True).clamp_(max=num_experts - 1)
        nth = at - (ends - needed)[expert]
        whole = counts[expert] // FULL
        if width > FULL:
            behind = (whole - 1) * FULL
        else:
            behind = nth * width if width in (EIGHT, FULL) else whole * FULL
        first = offsets[expert] + behind
        tiles[width] = Tiles(
            expert=expert.int(),
            first=first.int(),
            end=offsets[expert + 1].int(),
            count=ends[-1].int(),
        )
    return ExpertPlan(order=order.int(), tiles=tiles)
