"""Our hybrid state behind transformers' ``Cache``: KDA slots and MLA pages of a batch that grows.

``generate`` asks a cache for its length, and to copy sequences (beams, several answers to one
prompt). Layers never come to it: they use the views of :class:`k3vl.lm.cache.HybridCache`. KDA
keeps no past states, so a cache cannot be cropped and assisted decoding is not possible.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from transformers import Cache

from k3vl.lm.cache import HybridCache, plan_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from k3vl.config import TextConfig

PAGE_SIZE = 64
"""Rows of a prefill pass, as in the engine: both then compute the same numbers."""
_FIRST_UNITS = 32


@dataclass(slots=True, kw_only=True)
class State:
    """What one sequence of the batch has.

    Attributes:
        length: tokens whose state is held; padding is not.
        slot: units of the KDA state.
        pages: units of the MLA pages.
    """

    length: int = 0
    slot: list[int]
    pages: list[int] = field(default_factory=list)


class KimiK3Cache(Cache):
    """State of a batch of sequences.

    Args:
        config: of the language model.
        batch_size: sequences.
        dtype, device: of the model.

    Attributes:
        hybrid: the tensors; another object after the cache has grown.
        states: one per sequence.
    """

    def __init__(
        self, config: TextConfig, batch_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(layers=[])
        self._config, self._dtype, self._device = config, dtype, device
        sizes = plan_cache(config, dtype, budget_bytes=1 << 62, page_size=PAGE_SIZE)
        units = batch_size * (sizes.units_per_slot + 1) + _FIRST_UNITS
        self.hybrid = HybridCache(
            config, replace(sizes, num_units=units), dtype=dtype, device=device
        )
        self._free = list(range(units - 1, -1, -1))
        self.states = [State(slot=self._take(sizes.units_per_slot)) for _ in range(batch_size)]
        self._seen = 0

    def reserve(self, index: int, tokens: int) -> State:
        """Make room for so many tokens in all; the sequence's state."""
        state = self.states[index]
        missing = self.hybrid.sizes.pages(tokens) - len(state.pages)
        if missing > 0:
            state.pages += self._take(missing)
        return state

    def advance(self, columns: int) -> None:
        """Note that so many columns of the padded batch have been seen."""
        self._seen += columns

    # ------------------------------------------------------------------ transformers' questions

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen, padding included."""
        return self._seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no limit but the memory."""
        return -1

    @property
    def batch_size(self) -> int:
        """Sequences."""
        return len(self.states)

    @property
    def is_initialized(self) -> bool:
        """Always: memory is taken when the cache is made."""
        return True

    @property
    def is_linear(self) -> list[bool]:
        """Not all of it is: its length tells ``generate`` how much of the input is known."""
        return [self._config.is_kda(i) for i in range(self._config.num_hidden_layers)]

    @property
    def is_croppable(self) -> bool:
        """KDA has no past states."""
        return False

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse; see the head of the module.

        Raises:
            NotImplementedError: always, unless there is nothing to do.
        """
        if tokens_to_remove:
            raise NotImplementedError("KDA keeps no past states, so the cache cannot be cropped")

    # ------------------------------------------------------------------ whole sequences

    def reset(self) -> None:
        """Forget everything."""
        for state in self.states:
            self._free += state.pages
            state.pages, state.length = [], 0
            self.hybrid.clear(state.slot)
        self._seen = 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let sequence ``i`` be what ``beam_idx[i]`` was."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences, in this order."""
        self._select(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have every sequence ``repeats`` times, side by side."""
        self._select([index for index in range(len(self.states)) for _ in range(repeats)])

    def _select(self, indices: Sequence[int]) -> None:
        """Sequences that are named once move, others are copied."""
        old = self.states
        for index in set(range(len(old))) - set(indices):
            self._free += old[index].slot + old[index].pages
        moved: set[int] = set()
        states = []
        for index in indices:
            state = old[index]
            if index in moved:
                copied = self._take(len(state.slot) + len(state.pages))
                self.hybrid.copy(state.slot + state.pages, copied)
                slots = len(state.slot)
                state = State(length=state.length, slot=copied[:slots], pages=copied[slots:])
            moved.add(index)
            states.append(state)
        self.states = states

    # ------------------------------------------------------------------ units

    def _take(self, count: int) -> list[int]:
        """Cleared units; the buffer doubles when there are too few."""
        old = self.hybrid
        units = old.sizes.num_units
        while len(self._free) < count:
            self._free = [*range(2 * units - 1, units - 1, -1), *self._free]
            units *= 2
        if units > old.sizes.num_units:
            self.hybrid = HybridCache(
                self._config,
                replace(old.sizes, num_units=units),
                dtype=self._dtype,
                device=self._device,
            )
            self.hybrid.units[: old.sizes.num_units] = old.units
        taken = [self._free.pop() for _ in range(count)]
        self.hybrid.clear(taken)
        return taken
