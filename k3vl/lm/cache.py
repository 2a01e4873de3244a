"""One buffer for every kind of state: its division into units, and the views that kernels use.

Only tensors and sizes live here; who owns which unit is ``arena.py``'s business. The buffer is an
array of equal units. A unit is, whichever its owner needs:

- one MLA page: the latents of ``page_size`` tokens for every MLA layer;
- ``cells_per_unit`` KDA cells, each one head's recurrent state and convolution window of one KDA
  layer; a request's slot, and a checkpoint, is ``units_per_slot`` units in any order and place;
- ``feature_rows`` rows of encoder output.

A unit is as many cells as a page needs, so neither kind wastes much (K3: 3.5 % of a page, 0.3 % of
a slot), and nothing ever has to be contiguous or to move.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
import torch

from k3vl.errors import ConfigError
from k3vl.kernels.upload import upload
from k3vl.lm.packing import packed_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from k3vl.config import TextConfig
    from k3vl.lm.packing import States

Integers = TypeVar("Integers", "NDArray[np.int64]", torch.Tensor)

FeatureRows: TypeAlias = tuple[tuple[int, ...], int, int]
"""Units of an encoder output, and which of its rows: from the first to before the last."""

TILE = 16
"""Pages hold whole KDA tiles, so that a page border is a place where a state can be taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    """How a budget is divided.

    Attributes:
        num_units: equal units of the arena.
        unit_bytes: bytes of one.
        page_size: tokens of an MLA page, which is one unit.
        units_per_slot: units of a KDA slot or checkpoint.
        cells_per_unit: (layer, head) cells in one of them.
        feature_rows: encoder output rows in a unit.
        packed_units: units of a compressed checkpoint; 0 where one is as large as a slot.
    """

    num_units: int
    unit_bytes: int
    page_size: int
    units_per_slot: int
    cells_per_unit: int = 1
    feature_rows: int = 1
    packed_units: int = 0

    @property
    def units_per_checkpoint(self) -> int:
        """Units of a checkpoint."""
        return self.packed_units or self.units_per_slot

    def pages(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def feature_units(self, rows: int) -> int:
        """Units that hold so many rows of encoder output."""
        return -(-rows // self.feature_rows)


def bytes_per_cell(config: TextConfig, dtype: torch.dtype) -> int:
    """One head's float32 state and ``dtype`` window, rounded up to whole latent rows."""
    linear = config.linear_attn_config
    state = linear.head_dim**2 * 4
    window = (linear.short_conv_kernel_size - 1) * 3 * linear.head_dim * dtype.itemsize
    row = _latent_width(config) * dtype.itemsize
    return -(-(state + window) // row) * row


def plan_cache(
    config: TextConfig,
    dtype: torch.dtype,
    *,
    budget_bytes: int,
    page_size: int,
    states: States | None = None,
) -> CacheSizes:
    """Divide a byte budget into units; ``states`` is how checkpoints are packed, if they are.

    Raises:
        ConfigError: the page size is no multiple of 16, or the budget does not hold one request's
            slot and one page.
    """
    if page_size < TILE or page_size % TILE:
        raise ConfigError(f"page_size is {page_size}, must be a multiple of {TILE}")
    linear = config.linear_attn_config
    page = len(linear.full_attn_layers) * page_size * _latent_width(config) * dtype.itemsize
    cell = bytes_per_cell(config, dtype)
    per_unit = max(1, -(-page // cell))
    slot = -(-len(linear.kda_layers) * linear.num_heads // per_unit)
    unit_bytes = per_unit * cell
    num_units = budget_bytes // unit_bytes
    if num_units < slot + 1:
        raise ConfigError(
            f"cache budget of {budget_bytes:,} bytes is too small: one request needs "
            f"{slot * unit_bytes:,} bytes of KDA state and {unit_bytes:,} for a page of "
            f"{page_size} tokens"
        )
    return CacheSizes(
        num_units=num_units,
        unit_bytes=unit_bytes,
        page_size=page_size,
        units_per_slot=slot,
        cells_per_unit=per_unit,
        feature_rows=max(1, unit_bytes // (config.hidden_size * dtype.itemsize)),
        packed_units=0 if states is None else -(-packed_bytes(config, dtype, states) // unit_bytes),
    )


@dataclass(frozen=True, slots=True, eq=False)
class KDAState:
    """One KDA layer's view: windows [C, W-1, 3, K], states [C, K, V] float32 over all cells.

    ``index`` counts KDA layers; ``Batch.cells[index]`` are the layer's cells.
    """

    index: int
    windows: torch.Tensor
    states: torch.Tensor


class HybridCache:
    """The buffer and its views, in layer order.

    Attributes:
        spare: a unit behind all others, nobody's: where sequences that pad a pass have their state.
        blank: a row of every layer's latents that is zero: what rows see that pad a pass. Its unit
            is behind the spare one, and nobody writes there.
    """

    def __init__(
        self, config: TextConfig, sizes: CacheSizes, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate ``sizes``."""
        linear = config.linear_attn_config
        width, head = _latent_width(config), linear.head_dim
        carried = linear.short_conv_kernel_size - 1
        cells = (sizes.num_units + 1) * sizes.cells_per_unit  # the blank unit has none
        cell = bytes_per_cell(config, dtype)
        item = dtype.itemsize
        self.sizes = sizes
        self.buffer = torch.zeros(
            (sizes.num_units + 2) * sizes.unit_bytes, dtype=torch.uint8, device=device
        )
        self.spare = sizes.num_units
        typed = self.buffer.view(dtype)
        states = self.buffer.view(torch.float32).as_strided(
            (cells, head, head), (cell // 4, head, 1)
        )
        windows = typed.as_strided(
            (cells, carried, 3, head), (cell // item, 3 * head, head, 1), head * head * 4 // item
        )
        self.cell_views = states, windows
        rows = typed.view(-1, width)
        self.features = typed.as_strided(
            (sizes.num_units, sizes.feature_rows, config.hidden_size),
            (sizes.unit_bytes // item, config.hidden_size, 1),
        )
        # By words: torch gathers and scatters bytes five times slower.
        units = self.buffer.view(torch.int32).view(-1, sizes.unit_bytes // 4)
        self.units = units[: sizes.num_units]
        layers: list[KDAState | torch.Tensor] = []
        kda = mla = 0
        for layer in range(config.num_hidden_layers):
            if config.is_kda(layer):
                layers.append(KDAState(kda, windows, states))
                kda += 1
            else:  # row ``unit * rows_per_unit + t`` of this view is token t of the unit's page
                layers.append(rows[mla * sizes.page_size :])
                mla += 1
        self.layers = tuple(layers)
        self.rows_per_unit = sizes.unit_bytes // (width * item)
        self.blank = (self.spare + 1) * self.rows_per_unit
        self._kda_shape = (kda, linear.num_heads)
        self._per_unit = sizes.cells_per_unit
        self._inside = torch.arange(self._per_unit, device=device)

    def cells(self, slots: Sequence[Sequence[int]]) -> torch.Tensor:
        """Cells of every slot (its units), as [KDA layers, B, H] int64."""
        return upload(self.cells_on_host(slots), device=self.buffer.device)[0]

    def cells_on_host(self, slots: Sequence[Sequence[int]]) -> NDArray[np.int64]:
        """As :meth:`cells`, for a copy with other things."""
        units = np.array(slots, np.int64)
        return self._cells_in(units[..., None] * self._per_unit + np.arange(self._per_unit))

    def cells_of(self, units: torch.Tensor) -> torch.Tensor:
        """As :meth:`cells`, of units [B, U] int64 on the device; those below 0 have none, < 0."""
        cells = torch.add(self._inside, units[..., None], alpha=self._per_unit)
        return self._cells_in(cells).contiguous()

    def _cells_in(self, cells: Integers) -> Integers:
        """[B, U, cells in a unit] to [KDA layers, B, H]; a slot's last unit may have some over."""
        layers, heads = self._kda_shape
        held = cells.reshape(len(cells), -1)[:, : layers * heads]
        return held.reshape(-1, layers, heads).swapaxes(0, 1)

    def clear(self, units: Sequence[int]) -> None:
        """Make slots the states of empty sequences."""
        self.units.index_fill_(0, self._upload(units), 0)

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy one slot's units to another's."""
        here, there = upload(source, target, device=self.buffer.device)
        self.units.index_copy_(0, there, self.units.index_select(0, here))

    def write_units(self, units: Sequence[int], content: torch.Tensor) -> None:
        """Store [N] uint8 in units, in their order; what is left of the last is zero."""
        padded = content.new_zeros(len(units) * self.sizes.unit_bytes)
        padded[: len(content)] = content
        self.units.index_copy_(
            0, self._upload(units), padded.view(torch.int32).view(len(units), -1)
        )

    def read_units(self, units: Sequence[int]) -> torch.Tensor:
        """All bytes of units, in their order, [N] uint8."""
        return self.units.index_select(0, self._upload(units)).view(torch.uint8).flatten()

    def write_features(self, made: Sequence[tuple[tuple[int, ...], torch.Tensor]]) -> None:
        """Store encoder outputs, each [M, D], in units of their own."""
        if made:
            where = self._feature_index([(units, 0, len(rows)) for units, rows in made])
            self.features[where] = torch.cat([rows for _, rows in made]).to(self.features)

    def read_features(self, wanted: Sequence[FeatureRows]) -> tuple[torch.Tensor, ...]:
        """Rows of stored encoder outputs, [last - first, D] each."""
        if not wanted:
            return ()
        rows = self.features[self._feature_index(wanted)]
        return rows.split([last - first for _, first, last in wanted])

    def _feature_index(self, wanted: Sequence[FeatureRows]) -> tuple[torch.Tensor, ...]:
        """Unit and place in it of every row, one output behind the other."""
        size, held, places = self.sizes.feature_rows, [], []
        for units, first, last in wanted:
            unit, place = _places(first, last, size)
            held.append(np.asarray(units)[unit])
            places.append(place)
        both = upload(np.concatenate(held), np.concatenate(places), device=self.buffer.device)
        return tuple(both)

    def _upload(self, units: Sequence[int]) -> torch.Tensor:
        return upload(units, device=self.buffer.device)[0]


@lru_cache(16)  # pictures of one size come again and again
def _places(first: int, last: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which unit of an output's, of ``size`` rows, holds each of some rows, and where in it."""
    return np.divmod(np.arange(first, last), size)


def _latent_width(config: TextConfig) -> int:
    return config.kv_lora_rank + config.qk_rope_head_dim
