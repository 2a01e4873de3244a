"""SGLang's latent attention (FlashMLA and Triton) and attention residuals, as on Hopper."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from k3vl.kernels.bench.case import Work
from k3vl.kernels.bench.peers import named

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3vl.kernels.bench.case import Peer

_PAGE = 64
_MOST_SPLITS = 256
"""Parts of a context in its Triton backend on 132 multiprocessors, contexts of 8,192 and more."""


def decode_peers(
    q: torch.Tensor,
    latents: torch.Tensor,
    pages: torch.Tensor,
    length: int,
    latent_width: int,
    scale: float,
) -> dict[str, Peer]:
    """Absorbed decoding of equally long contexts; the result is ours, [B, H, R].

    Args:
        q: [B, H, R + P].
        latents: [C, R + P], the pool.
        pages: [B, L / 64] int64, the pages of 64 latents of every sequence.
        length: L.
        latent_width: R.
        scale: of the scores.
    """
    args = (q, latents, pages, length, latent_width, scale)
    return named(
        {
            "FlashMLA (sgl-kernel), schedule made before": lambda: _flash_mla(*args),
            "Triton decode_attention_fwd, split counts made before": lambda: _triton_decode(*args),
        }
    )


def _flash_mla(
    q: torch.Tensor,
    latents: torch.Tensor,
    pages: torch.Tensor,
    length: int,
    latent_width: int,
    scale: float,
) -> Work:
    flash_mla: Any = import_module("sgl_kernel.flash_mla")
    batch, heads, width = q.shape
    lengths = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    schedule, splits = flash_mla.get_mla_metadata(lengths, heads, 1, is_fp8_kvcache=False)
    table = pages.int().contiguous()

    def decode() -> torch.Tensor:
        out, _ = flash_mla.flash_mla_with_kvcache(
            q=q.unsqueeze(1),
            k_cache=latents.view(-1, _PAGE, 1, width),
            block_table=table,
            cache_seqlens=lengths,
            head_dim_v=latent_width,
            tile_scheduler_metadata=schedule,
            num_splits=splits,
            softmax_scale=scale,
            causal=True,
        )
        return out.view(batch, heads, latent_width)

    return Work(decode, decode)


def _triton_decode(
    q: torch.Tensor,
    latents: torch.Tensor,
    pages: torch.Tensor,
    length: int,
    latent_width: int,
    scale: float,
) -> Work:
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
    from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton

    utils: Any = import_module("sgl_kernel.utils")
    (batch, heads, _), device = q.shape, q.device
    lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
    splits = torch.empty(batch, dtype=torch.int32, device=device)
    cores = torch.cuda.get_device_properties(device).multi_processor_count
    # Its backend takes K3's 96 key heads from the configuration, though the cache has one.
    get_num_kv_splits_triton[(1,)](
        splits, lengths, batch, 1, heads, heads, _MOST_SPLITS, cores, MAX_NUM_SEQ=256
    )
    starts = (torch.arange(batch + 1, device=device) * length).int()
    rows = (pages.unsqueeze(-1) * _PAGE + torch.arange(_PAGE, device=device)).flatten()
    parts = torch.empty(batch, heads, _MOST_SPLITS, latent_width, device=device)
    sums = torch.empty(batch, heads, _MOST_SPLITS, device=device)
    keys = latents.unsqueeze(1)
    out = q.new_empty(batch, heads, latent_width)
    follows = utils.is_arch_support_pdl()

    def decode() -> torch.Tensor:
        decode_attention_fwd(
            q,
            keys,
            keys[..., :latent_width],
            out,
            starts,
            rows,
            parts,
            sums,
            splits,
            _MOST_SPLITS,
            scale,
            1.0,
            1.0,
            has_mla=True,
            use_pdl=follows,
        )
        return out

    return Work(decode, decode)


def prefill_peers(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shared: torch.Tensor,
    latents: torch.Tensor,
    kv_b: torch.Tensor,
    scale: float,
) -> dict[str, Peer]:
    """Causal attention of T tokens behind L - T cached ones; the result is ours, [T, H, V].

    Its Triton backend expands keys and values where nothing is cached, and otherwise stays in the
    latent space.

    Args:
        q: [T, H, K + P].
        k: [L, H, K], shared: [L, P], v: [L, H, V].
        latents: [L, R], what k and v were expanded from.
        kv_b: [H, K + V, R], by which.
        scale: of the scores.
    """
    if q.shape[0] == k.shape[0]:
        name = "Triton extend_attention_fwd, keys joined before"
        return named({name: lambda: _expanded(q, k, v, shared, scale)})
    name = "Triton extend_attention_fwd over cached latents (no query or value product)"
    return named({name: lambda: _absorbed(q, shared, latents, kv_b, scale)})


def _expanded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shared: torch.Tensor, scale: float
) -> Work:
    joined = torch.cat([k, shared.unsqueeze(1).expand(-1, k.shape[1], -1)], -1)
    nothing = k.new_zeros(_PAGE, 1, 576)
    out = v.new_empty(q.shape[0], *v.shape[1:])
    extend = _extend(q, joined, v.contiguous(), out, nothing, 512, 0, scale)
    return Work(extend, extend)


def _absorbed(
    q: torch.Tensor, shared: torch.Tensor, latents: torch.Tensor, kv_b: torch.Tensor, scale: float
) -> Work:
    tokens, heads, _ = q.shape
    part, latent = shared.shape[1], latents.shape[1]
    plain = q.shape[2] - part
    by_key, by_value = kv_b.split([plain, kv_b.shape[1] - plain], 1)
    absorbed = torch.cat([torch.einsum("thk,hkr->thr", q[..., :plain], by_key), q[..., plain:]], -1)
    context = torch.cat([latents, shared], -1).unsqueeze(1)  # [L, 1, R + P]
    prefix = context.shape[0] - tokens
    new = context[prefix:].contiguous()
    out = q.new_empty(tokens, heads, latent)
    values = new[..., :latent].contiguous()
    extend = _extend(absorbed, new, values, out, context[:prefix], latent, prefix, scale)

    def result() -> torch.Tensor:
        return torch.einsum("thr,hvr->thv", extend(), by_value)

    return Work(extend, result)


def _extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cached: torch.Tensor,
    value_width: int,
    prefix: int,
    scale: float,
) -> Callable[[], torch.Tensor]:
    """One sequence through its kernel; ``cached`` [C, 1, D], of which ``prefix`` rows count."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    device, tokens = q.device, q.shape[0]
    rows = torch.arange(max(1, prefix), device=device)
    new_starts = torch.tensor([0, tokens], device=device)
    cached_starts = torch.tensor([0, prefix], dtype=torch.int32, device=device)

    def extend() -> torch.Tensor:
        extend_attention_fwd(
            q,
            k,
            v,
            out,
            cached,
            cached[..., :value_width],
            new_starts,
            cached_starts,
            rows,
            custom_mask=None,
            is_causal=True,
            mask_indptr=None,
            max_len_extend=tokens,
            k_scale=1.0,
            v_scale=1.0,
            sm_scale=scale,
        )
        return out

    return extend


def residual_peers(
    rows: torch.Tensor, query: torch.Tensor, norm: torch.Tensor, eps: float
) -> dict[str, Peer]:
    """Mixture over depth; the result is ours, [N, D]."""
    name = "AttnResidual: 2 Triton launches + RMSNorm"
    return named({name: lambda: _residual(rows, query, norm, eps)})


def _residual(rows: torch.Tensor, query: torch.Tensor, norm: torch.Tensor, eps: float) -> Work:
    from sglang.srt.layers.attn_residual import AttnResidual
    from sglang.srt.layers.layernorm import RMSNorm

    out_norm = RMSNorm(rows.shape[-1], eps=eps).to(rows.device, rows.dtype)
    out_norm.weight.data.copy_(norm)
    # It multiplies the two vectors itself, and keeps the product.
    score_norm = SimpleNamespace(weight=torch.ones_like(query), variance_epsilon=eps)
    score = SimpleNamespace(weight=query.unsqueeze(0))
    current = rows[-1].contiguous()
    bank = rows[:-1].transpose(0, 1).contiguous()  # [N, R - 1, D]
    stream = AttnResidual(current, bank.shape[1], bank)

    def mix() -> torch.Tensor:
        mixed, _ = stream.forward(current, None, score, score_norm, out_norm)
        return mixed

    return Work(mix, mix)
