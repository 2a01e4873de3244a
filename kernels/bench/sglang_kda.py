"""SGLang's Kimi Delta Attention: convolution, recurrence and gated norm, launch by launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from k3vl.kernels.bench.case import Work
from k3vl.kernels.bench.peers import named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from k3vl.kernels.bench.case import Peer
    from k3vl.kernels.kda import KDAWeights

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""qkv, gate, decay and write, columns of one projection."""

_FUSED_HEADS = (3, 6, 12)
"""For which its single launch of a whole decode step is compiled."""


@dataclass(frozen=True, slots=True, eq=False)
class _Pool:
    """States as SGLang lays them out, one slot a sequence.

    Attributes:
        windows: [B, W - 1, 3 H K], the model's dtype, oldest input first.
        states: [B, H, V, K] float32: values first, where ours has keys first.
        slots: [B] int32.
    """

    windows: torch.Tensor
    states: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def of(cls, windows: torch.Tensor, states: torch.Tensor, cells: torch.Tensor) -> _Pool:
        """A copy of our pool."""
        taken = windows[cells]  # [B, H, W - 1, 3, K]
        return cls(
            windows=taken.permute(0, 2, 3, 1, 4).flatten(2).contiguous(),
            states=states[cells].transpose(-1, -2).contiguous(),
            slots=torch.arange(cells.shape[0], dtype=torch.int32, device=cells.device),
        )

    def copy_(self, other: _Pool) -> None:
        """Begin again from another's states."""
        self.windows.copy_(other.windows)
        self.states.copy_(other.states)


def decode_peers(
    args: Inputs,
    weights: KDAWeights,
    windows: torch.Tensor,
    states: torch.Tensor,
    cells: torch.Tensor,
) -> dict[str, Peer]:
    """One token of every sequence; the result is ours, [B, H K]."""
    begin = partial(_Pool.of, windows, states, cells)
    peers = {
        "causal_conv1d_update + packed KDA decode + rms_norm_gated": lambda: _decode(
            args, weights, begin()
        )
    }
    if cells.shape[1] in _FUSED_HEADS:
        peers["kda_fused_decode"] = lambda: _fused(args, weights, begin())
    return named(peers)


def _decode(args: Inputs, weights: KDAWeights, begin: _Pool) -> Work:
    from sglang.kernels.ops.attention.fla.fused_norm_gate import rms_norm_gated
    from sglang.kernels.ops.attention.fla.fused_recurrent import fused_recurrent_kda_packed_decode
    from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update

    qkv, gate, decay, write = _as_projected(args)
    batch, heads, width = qkv.shape[0], begin.states.shape[1], begin.states.shape[-1]
    pool = _Pool(begin.windows.clone(), begin.states.clone(), begin.slots)

    def step() -> torch.Tensor:
        convolved = causal_conv1d_update(
            qkv,
            pool.windows.transpose(-1, -2),
            weights.conv,
            None,
            activation="silu",
            conv_state_indices=pool.slots,
        )
        out = qkv.new_empty(batch, 1, heads, width)
        fused_recurrent_kda_packed_decode(
            mixed_qkv=convolved,
            a=decay,
            b=write,
            A_log=weights.a_log,
            dt_bias=weights.dt_bias,
            scale=width**-0.5,
            initial_state=pool.states,
            out=out,
            ssm_state_indices=pool.slots,
            use_qk_l2norm_in_kernel=True,
            lower_bound=weights.lower_bound,
        )
        normed = rms_norm_gated(
            out.transpose(0, 1),
            gate.unflatten(-1, (heads, width)),
            weights.o_norm,
            None,
            "sigmoid",
            eps=weights.eps,
        )
        return normed.reshape(batch, heads * width)

    return Work(step, partial(_from_start, step, pool, begin))


def _fused(args: Inputs, weights: KDAWeights, begin: _Pool) -> Work:
    from sglang.kernels.ops.attention.kda_fused_decode import covered, kda_fused_decode

    qkv, gate, decay, write = _as_projected(args)
    heads, width = begin.states.shape[1], begin.states.shape[-1]
    columns = [part.contiguous() for part in weights.conv.T.split(heads * width, 1)]  # [W, H K]
    no_bias = torch.zeros(3 * heads * width, device=qkv.device)
    pool = _Pool(begin.windows.clone(), begin.states.clone(), begin.slots)
    if not covered(qkv, decay, write, pool.windows, pool.states, pool.slots, gate):
        raise ValueError("kda_fused_decode does not cover this shape")

    def step() -> torch.Tensor:
        out = kda_fused_decode(
            qkv,
            decay,
            write,
            pool.windows,
            *columns,
            no_bias,
            weights.a_log,
            weights.dt_bias,
            gate,
            weights.o_norm,
            pool.states,
            pool.slots,
            scale=width**-0.5,
            onorm_eps=weights.eps,
            lower_bound=weights.lower_bound,
        )
        return out.reshape(qkv.shape[0], heads * width)

    return Work(step, partial(_from_start, step, pool, begin))


def prefill_peers(
    args: Inputs, weights: KDAWeights, lengths: Sequence[int], heads: int
) -> dict[str, Peer]:
    """Packed sequences from empty states; the result is ours, [N, H K]."""
    return named(
        {
            "chunk_kda (no convolution, no output norm)": lambda: _chunks(
                args, weights, lengths, heads, whole=False
            ),
            "3 causal_conv1d_fn + chunk_kda + rms_norm_gated": lambda: _chunks(
                args, weights, lengths, heads, whole=True
            ),
        }
    )


def _chunks(
    args: Inputs, weights: KDAWeights, lengths: Sequence[int], heads: int, *, whole: bool
) -> Work:
    from sglang.kernels.ops.attention.fla.fused_norm_gate import rms_norm_gated
    from sglang.kernels.ops.attention.fla.kda import chunk_kda

    qkv, gate, decay, write = _as_projected(args)
    device, width = qkv.device, qkv.shape[1] // (3 * heads)
    begin = _Pool(
        windows=qkv.new_zeros(len(lengths), weights.conv.shape[1] - 1, qkv.shape[1]),
        states=torch.zeros(len(lengths), heads, width, width, device=device),
        slots=torch.arange(len(lengths), dtype=torch.int32, device=device),
    )
    pool = _Pool(begin.windows.clone(), begin.states.clone(), begin.slots)
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    convolve = _convolution(qkv, weights, lengths, starts, pool, heads)
    g = decay.unflatten(-1, (heads, width)).unsqueeze(0)

    def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return chunk_kda(  # writes what it returns over v
            q=q,
            k=k,
            v=v,
            g=g,
            beta=write.float().sigmoid().unsqueeze(0),
            initial_state=pool.states,
            initial_state_indices=pool.slots,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=starts,
            A_log=weights.a_log,
            dt_bias=weights.dt_bias,
            lower_bound=weights.lower_bound,
        )

    def layer() -> torch.Tensor:
        out = rms_norm_gated(
            core(*convolve()),
            gate.unflatten(-1, (heads, width)),
            weights.o_norm,
            None,
            "sigmoid",
            eps=weights.eps,
        )
        return out.reshape(qkv.shape[0], heads * width)

    if not whole:
        return Work(partial(core, *convolve()))
    return Work(layer, partial(_from_start, layer, pool, begin))


def _convolution(
    qkv: torch.Tensor,
    weights: KDAWeights,
    lengths: Sequence[int],
    starts: torch.Tensor,
    pool: _Pool,
    heads: int,
) -> Callable[[], list[torch.Tensor]]:
    """Its three launches, to q, k and v [1, N, H, K]; no sequence has a past."""
    from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn

    channels = qkv.shape[1] // 3
    inputs, kernels = qkv.T.split(channels, 0), weights.conv.split(channels, 0)
    windows = pool.windows.transpose(-1, -2).split(channels, 1)
    continues = torch.zeros(len(lengths), dtype=torch.bool, device=qkv.device)

    def convolve() -> list[torch.Tensor]:
        convolved = [
            causal_conv1d_fn(
                x,
                kernel,
                None,
                activation="silu",
                conv_states=window,
                has_initial_state=continues,
                cache_indices=pool.slots,
                query_start_loc=starts,
                seq_lens_cpu=list(lengths),
            )
            for x, kernel, window in zip(inputs, kernels, windows, strict=True)
        ]
        return [x.T.unflatten(-1, (heads, channels // heads)).unsqueeze(0) for x in convolved]

    return convolve


def _as_projected(args: Inputs) -> Inputs:
    """As its model has them: qkv and gate of one projection, decay alone, write behind a third.

    Its rows begin at multiples of 16 bytes, which its CUDA kernels count on.
    """
    qkv, gate, decay, write = args
    heads = write.shape[1]
    wide = torch.cat([qkv, gate], 1)
    narrow = pad(write, (128, -heads % 8))
    qkv, gate = wide.split([qkv.shape[1], gate.shape[1]], 1)
    return qkv, gate, decay.contiguous(), narrow.narrow(1, 128, heads)


def _from_start(work: Callable[[], torch.Tensor], pool: _Pool, begin: _Pool) -> torch.Tensor:
    """The result of the first call; one before it, for what is chosen by trying."""
    work()
    pool.copy_(begin)
    return work()
