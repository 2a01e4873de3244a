"""The least that a forward pass of the language model moves and computes, from its configuration.

Weights and state are counted once a pass; what lies between two ops is not, since it need not leave
the chip. Routing is taken as uniform.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3vl.checkpoint import logical_tensors
from k3vl.checkpoint_summary import part_of
from k3vl.lm.table import expected_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from k3vl.checkpoint import LogicalTensor
    from k3vl.config import TextConfig
    from k3vl.kernels.bench.timing import Ceilings


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes to and from memory, and floating-point operations (two for a multiply and add)."""

    bytes: float
    flops: float

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def seconds(self, ceilings: Ceilings) -> float:
        """By whichever of the two takes longer."""
        return max(self.bytes / ceilings.bandwidth, self.flops / ceilings.flops)


def pass_work(
    config: TextConfig,
    sequences: Sequence[tuple[int, int]],
    *,
    dtype: torch.dtype,
    packed: bool,
    logits: int,
) -> Work:
    """One forward pass.

    Args:
        config: of the model.
        sequences: (tokens in the cache, new tokens) of every sequence.
        dtype: of weights and cache.
        packed: routed experts stay in 4 bits.
        logits: rows that the head computes.
    """
    tokens = sum(new for _, new in sequences)
    stored = logical_tensors(expected_tensors(config, quantized_experts=packed))
    total = Work(0, 0)
    for name, tensor in stored.items():
        size = _size(tensor, dtype)
        match part_of(name, config):
            case "embedding":
                total += Work(tokens * size / config.vocab_size, 0)
            case "head":
                total += Work(size if logits else 0, 2 * tensor.numel * logits)
            case "experts":
                share = config.num_experts_per_token / config.num_experts
                touched = 1 - (1 - share) ** tokens
                total += Work(size * touched, 2 * tensor.numel * share * tokens)
            case _:
                products = 2 * tensor.numel * tokens if len(tensor.shape) > 1 else 0
                total += Work(size, products)
    for context, new in sequences:
        total += _kda_state(config, new, dtype) + _mla_attention(config, context, new, dtype)
    return total


def prefill_work(
    config: TextConfig, tokens: int, pass_tokens: int, *, dtype: torch.dtype, packed: bool
) -> list[Work]:
    """The passes of one prompt, of which the last computes one row of logits."""
    begins = range(0, tokens, pass_tokens)
    return [
        pass_work(
            config,
            [(begin, min(pass_tokens, tokens - begin))],
            dtype=dtype,
            packed=packed,
            logits=int(begin == begins[-1]),
        )
        for begin in begins
    ]


def weight_bytes(config: TextConfig, *, dtype: torch.dtype, packed: bool) -> int:
    """Memory of all weights."""
    stored = logical_tensors(expected_tensors(config, quantized_experts=packed))
    return sum(_size(tensor, dtype) for tensor in stored.values())


def _size(tensor: LogicalTensor, dtype: torch.dtype) -> int:
    """Bytes in memory."""
    return tensor.nbytes if tensor.encoding == "mxfp4" else tensor.numel * dtype.itemsize


def _kda_state(config: TextConfig, new: int, dtype: torch.dtype) -> Work:
    """Every head's state and window, read and written once; the delta rule token by token."""
    linear = config.linear_attn_config
    heads, head = linear.num_heads, linear.head_dim
    window = (linear.short_conv_kernel_size - 1) * 3 * head * dtype.itemsize
    layers = len(linear.kda_layers)
    return Work(
        layers * heads * 2 * (4 * head * head + window), layers * heads * 8 * head * head * new
    )


def _mla_attention(config: TextConfig, context: int, new: int, dtype: torch.dtype) -> Work:
    """Over latents for a single token, else over keys and values expanded from them."""
    heads, latent, shared = (
        config.num_attention_heads,
        config.kv_lora_rank,
        config.qk_rope_head_dim,
    )
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    layers = len(config.linear_attn_config.full_attn_layers)
    moved = (context + new + new) * (latent + shared) * dtype.itemsize
    if new == 1:
        flops = 2 * heads * (2 * latent + shared) * (context + 1)
    else:
        pairs = new * context + new * (new + 1) // 2
        expanded = 2 * heads * (nope + value) * latent * context
        flops = 2 * heads * (nope + shared + value) * pairs + expanded
    return Work(layers * moved, layers * flops)
