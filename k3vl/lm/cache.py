"""Device memory of the two kinds of state: KDA's fixed slots and MLA's paged latents.

Only tensors live here; who owns which slot and page is ``pool.py``'s and the scheduler's business.
A KDA slot holds one request's recurrent state and convolution window for every KDA layer; a page
holds ``page_size`` tokens' latents for every MLA layer. The last slot and the last page are spare:
padded rows may write there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from k3vl.errors import ConfigError

if TYPE_CHECKING:
    from k3vl.config import TextConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    """How many slots and pages there are."""

    num_slots: int
    num_pages: int
    page_size: int


def bytes_per_slot(config: TextConfig, dtype: torch.dtype) -> int:
    """Bytes of one request's KDA state over all KDA layers (float32 state, ``dtype`` windows)."""
    linear = config.linear_attn_config
    width = linear.num_heads * linear.head_dim
    state = linear.num_heads * linear.head_dim**2 * 4
    window = (linear.short_conv_kernel_size - 1) * 3 * width * dtype.itemsize
    return len(linear.kda_layers) * (state + window)


def bytes_per_page(config: TextConfig, dtype: torch.dtype, page_size: int) -> int:
    """Bytes of one page over all MLA layers."""
    width = config.kv_lora_rank + config.qk_rope_head_dim
    return len(config.linear_attn_config.full_attn_layers) * page_size * width * dtype.itemsize


def plan_cache(
    config: TextConfig, dtype: torch.dtype, *, budget_bytes: int, num_slots: int, page_size: int
) -> CacheSizes:
    """Divide a byte budget: a fixed number of slots, the rest in pages.

    Raises:
        ConfigError: the budget does not hold the slots and one page beside the spare ones.
    """
    slots = (num_slots + 1) * bytes_per_slot(config, dtype)
    page = bytes_per_page(config, dtype, page_size)
    num_pages = (budget_bytes - slots) // page - 1
    if num_pages < 1:
        raise ConfigError(
            f"cache budget of {budget_bytes:,} bytes is too small: {num_slots} requests need "
            f"{slots:,} bytes of KDA state, a page of {page_size} tokens {page:,} bytes"
        )
    return CacheSizes(num_slots=num_slots, num_pages=num_pages, page_size=page_size)


@dataclass(frozen=True, slots=True, eq=False)
class KDAState:
    """One KDA layer's pools: windows [S, W-1, 3 H K] and states [S, H, K, V] float32."""

    windows: torch.Tensor
    states: torch.Tensor


class HybridCache:
    """The pools of every layer, in layer order."""

    def __init__(
        self, config: TextConfig, sizes: CacheSizes, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate ``sizes`` and the spare slot and page."""
        linear = config.linear_attn_config
        slots, heads, head = sizes.num_slots + 1, linear.num_heads, linear.head_dim
        tokens = (sizes.num_pages + 1) * sizes.page_size
        latent = config.kv_lora_rank + config.qk_rope_head_dim
        carried = linear.short_conv_kernel_size - 1

        def zeros(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self.sizes = sizes
        self.layers: tuple[KDAState | torch.Tensor, ...] = tuple(
            KDAState(
                windows=zeros(slots, carried, 3 * heads * head),
                states=zeros(slots, heads, head, head, kind=torch.float32),
            )
            if config.is_kda(layer)
            else zeros(tokens, latent)
            for layer in range(config.num_hidden_layers)
        )

    def reset_slot(self, slot: int) -> None:
        """Make ``slot`` the state of an empty sequence."""
        for layer in self.layers:
            if isinstance(layer, KDAState):
                layer.windows[slot] = 0
                layer.states[slot] = 0
