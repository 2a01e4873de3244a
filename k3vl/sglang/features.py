"""Pixels of our encoder items: uint8 on their way, the tower's numbers on the tower's device.

An item that our processor made holds uint8 patches and says so; SGLang's own items (in parity, of
its encoder server) hold floats and go through as they are.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final

import torch

from k3vl.vision.processor import level_table

if TYPE_CHECKING:
    from collections.abc import Sequence

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

    def __getattr__(self, name: str) -> Any:
        """Whatever else somebody reads or calls is the item's."""
        return getattr(self._item, name)

    @cached_property
    def feature(self) -> torch.Tensor:
        """[N, 3, P, P] in the tower's dtype, on its device."""
        key = self._item.model_specific_data[NORMALISE_KEY]
        return normalised(self._item.feature, key, self._device, self._dtype)


def as_the_tower_wants(items: Sequence[Any], device: torch.device, dtype: torch.dtype) -> list[Any]:
    """The items, ours as views of themselves; nothing is copied or moved yet."""
    return [
        ItemView(item, device, dtype) if NORMALISE_KEY in item.model_specific_data else item
        for item in items
    ]


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
