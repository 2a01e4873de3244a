"""Pixels of our encoder items: uint8 on their way, the tower's numbers on the tower's device.

An item that our processor made holds uint8 patches and says so; SGLang's own items (in parity, of
its encoder server) hold floats and go through as they are.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import torch

from k3vl.vision.processor import level_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NORMALISE_KEY: Final = "k3vl_normalise"
"""In an item's ``model_specific_data``: mean and standard deviation of red, green and blue, six
numbers. Its patches are uint8, or what SGLang made of these without a change of value."""


class ItemView:
    """An encoder item of ours as SGLang's tower wants it; SGLang's list keeps the item itself.

    The numbers are made when they are asked for, so only on the rank that encodes the item, and go
    with the view.
    """

    def __init__(self, item: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._item, self._device, self._dtype = item, device, dtype
        self._found: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        """Whatever else somebody reads or calls is the item's."""
        return getattr(self._item, name)

    @property
    def feature(self) -> Any:
        """[N, 3, P, P] in the tower's dtype, on its device.

        Patches in SGLang's pool are what stands for them, until ``reconstruct`` takes them out.
        """
        if self._found is None:
            patches = self._item.feature
            if not isinstance(patches, torch.Tensor):
                return patches
            key = self._item.model_specific_data[NORMALISE_KEY]
            self._found = normalised(patches, key, self._device, self._dtype)
        return self._found


def as_the_tower_wants(items: Sequence[Any], device: torch.device, dtype: torch.dtype) -> list[Any]:
    """The items, ours as views of themselves; nothing is copied or moved yet."""
    return [
        ItemView(item, device, dtype) if NORMALISE_KEY in item.model_specific_data else item
        for item in items
    ]


def place_beside_the_tower(
    items: Sequence[Any], device: torch.device, wrap: Callable[[Any], None]
) -> None:
    """Patches into SGLang's pool on the GPU, from which its scheduler takes pictures of its own.

    What stays on the CPU the scheduler copies out of shared memory and then to the GPU, between two
    of its steps, and the tokenizer's event loop copies into it. One item at a time is on the GPU
    besides the pool; where there is no room for it, it stays on the CPU.

    Args:
        items: ours count, others stay as they are.
        device: the pool's.
        wrap: SGLang's; puts something else in the place of an item's feature on that device.
    """
    for item in items:
        patches = item.feature
        if NORMALISE_KEY not in item.model_specific_data or not isinstance(patches, torch.Tensor):
            continue
        try:
            item.feature = patches.to(device)
            wrap(item)
        except torch.OutOfMemoryError:
            item.feature = patches


def normalised(
    patches: torch.Tensor, mean_and_std: Sequence[float], device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """``k3vl.vision.processor.normalise`` on a device, and bit-equal to it.

    Args:
        patches: [N, 3, P, P], levels 0-255 in any dtype, anywhere.
        mean_and_std: of red, green, blue.
        device: of the result.
        dtype: of the result; the float32 values, rounded to the nearest.

    Returns:
        [N, 3, P, P].
    """
    table, first = _table(tuple(mean_and_std), device, dtype)
    found: torch.Tensor = table[patches.to(device, non_blocking=True).int() + first]
    return found


@lru_cache(maxsize=8)
def _table(
    mean_and_std: tuple[float, ...], device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """[768] values of the levels of all channels, and [3, 1, 1] int32, where each begins."""
    levels = level_table(mean_and_std[:3], mean_and_std[3:])
    first = torch.tensor([0, 256, 512], dtype=torch.int32).view(3, 1, 1)
    return torch.from_numpy(levels).flatten().to(device, dtype), first.to(device)
