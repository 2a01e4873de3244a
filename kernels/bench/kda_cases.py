"""Kimi Delta Attention at K3's width, beside SGLang and flash-linear-attention where installed."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from k3vl.kernels.bench import sglang_kda
from k3vl.kernels.bench.case import Case, Peer, Work, normal, ratio_of_norms
from k3vl.kernels.kda import KDAWeights
from k3vl.kernels.kda.gpu import kda_decode, kda_prefill, prefill_launches
from k3vl.kernels.kda.hopper import HopperShape
from k3vl.kernels.kda.reference import kda_decode_reference, kda_prefill_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""qkv, gate, decay and write, columns of one projection."""

_K = 128
_STATE = _K * _K * 4
_CELL = 67968
"""Bytes of a cell of K3's cache: a state and, behind it, a window (``lm/cache.py``)."""
_UNIT = 27
"""Cells in a row of its cache, with pages of 64 tokens; one such row lies anywhere."""

Memory = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""windows, states and cells."""


def _weights(heads: int) -> KDAWeights:
    single = torch.float32
    return KDAWeights(
        conv=normal(3 * heads * _K, 4, dtype=single) / 2,
        a_log=normal(heads, dtype=single) / 3,
        dt_bias=normal(heads * _K, dtype=single),
        o_norm=normal(_K, dtype=single).abs() + 0.5,
        eps=1e-5,
        lower_bound=-5.0,
    )


def _inputs(rows: int, heads: int) -> Inputs:
    widths = (3 * heads * _K, heads * _K, heads * _K, heads)
    qkv, gate, decay, write = normal(rows, sum(widths)).split(widths, -1)
    return qkv, gate, decay, write


def _single(args: Inputs) -> Inputs:
    qkv, gate, decay, write = (x.float() for x in args)
    return qkv, gate, decay, write


def decode_cases() -> Iterator[Case]:
    """One token of B sequences; bytes are the states, read and written, and the rows."""
    for batch, heads in ((1, 96), (8, 96), (32, 96), (128, 96), (32, 12)):
        weights, args = _weights(heads), _inputs(batch, heads)
        windows, states, cells = _in_units(batch, heads)
        step = partial(kda_decode, *args, weights, windows, states, cells)
        fresh = windows.clone(), states.clone()

        def ours(
            args: Inputs = args,
            weights: KDAWeights = weights,
            pool: tuple[torch.Tensor, torch.Tensor] = (windows, states),
            fresh: tuple[torch.Tensor, torch.Tensor] = fresh,
            cells: torch.Tensor = cells,
        ) -> torch.Tensor:
            for x, begin in zip(pool, fresh, strict=True):
                x.copy_(begin)
            return kda_decode(*args, weights, *pool, cells)

        def want(
            args: Inputs = args,
            weights: KDAWeights = weights,
            fresh: tuple[torch.Tensor, torch.Tensor] = fresh,
            cells: torch.Tensor = cells,
        ) -> torch.Tensor:
            # Copies even of float32: the reference writes into them, and the peers begin there too.
            windows, states = (x.to(torch.float32, copy=True) for x in fresh)
            return kda_decode_reference(*_single(args), weights, windows, states, cells)

        rows = batch * heads * _K * 2
        yield Case(
            op="kda_decode",
            shape=f"B{batch} H{heads} K128, all fused",
            ours=ours,
            timed=step,
            want=want,
            limit=8e-3,
            # states and windows both ways; qkv, gate, decay in; output
            bytes=batch * heads * 2 * _STATE + rows * (2 * 9 + 6),
            flops=batch * heads * 8 * _K * _K,
            variants=_decode_variants(args, weights, (windows, states), fresh, cells),
            peers={
                **_decode_peers(batch, heads, args, weights),
                **sglang_kda.decode_peers(args, weights, *fresh, cells),
            },
        )


def _decode_variants(
    args: Inputs,
    weights: KDAWeights,
    pool: tuple[torch.Tensor, torch.Tensor],
    fresh: tuple[torch.Tensor, torch.Tensor],
    cells: torch.Tensor,
) -> dict[str, Peer]:
    """Other ways, compared with the default one in all that it writes."""

    def prepare(
        step: Callable[..., torch.Tensor], place: Callable[[int, int], Memory] | None = None
    ) -> Work:
        memory = place(*cells.shape) if place else (*pool, cells)

        def result() -> torch.Tensor:
            ours = fresh[0].clone(), fresh[1].clone()
            for mine, theirs in zip(memory, fresh, strict=False):
                mine[memory[2]] = theirs[cells]
            kda_decode(*args, weights, *ours, cells)
            got = step(*args, weights, *memory)
            error = ratio_of_norms(memory[1][memory[2]], ours[1][cells])
            assert error < 1e-5, f"states wrong by {error:.1e}"
            assert torch.equal(memory[0][memory[2]], ours[0][cells]), "wrong windows"
            return got

        return Work(partial(step, *args, weights, *memory), result)

    ways: dict[str, Callable[[], Work]] = {
        "heads anywhere": partial(prepare, kda_decode, _anywhere),
        "in Triton": partial(prepare, partial(kda_decode, hopper=False)),
    }
    return {name: Peer(way) for name, way in ways.items()}


def _anywhere(batch: int, heads: int) -> Memory:
    """Every head in a place of its own, which no cache does: what order in memory is worth."""
    windows = normal(batch * heads, 3, 3, _K)
    states = normal(batch * heads, _K, _K, dtype=torch.float32)
    cells = torch.randperm(batch * heads, device=windows.device).view(batch, heads)
    return windows, states, cells


def _in_units(batch: int, heads: int) -> Memory:
    """Room as the cache has it: a sequence's heads in units anywhere, those of a unit in a row."""
    units = -(-heads // _UNIT)
    buffer = normal(batch * units * _UNIT, _CELL // 4, dtype=torch.float32)
    states = buffer[:, : _K * _K].view(-1, _K, _K)
    windows = buffer.view(torch.bfloat16)[:, 2 * _K * _K :][:, : 9 * _K].view(-1, 3, 3, _K)
    windows.copy_(normal(*windows.shape))
    order = torch.randperm(batch * units, device=buffer.device).view(batch, units, 1)
    inside = torch.arange(_UNIT, device=buffer.device)
    cells = (order * _UNIT + inside).flatten(1)[:, :heads].contiguous()
    return windows, states, cells


def _decode_peers(batch: int, heads: int, args: Inputs, weights: KDAWeights) -> dict[str, Peer]:
    if find_spec("fla") is None:
        return {}
    name = "fla 0.6.0 fused_recurrent_kda (no convolution, no output norm)"
    return {name: Peer(partial(_fla_decode, batch, heads, args, weights))}


def _fla_decode(batch: int, heads: int, args: Inputs, weights: KDAWeights) -> Work:
    from fla.ops.kda import fused_recurrent_kda

    q, k, v = (x.reshape(batch, 1, heads, _K).contiguous() for x in args[0].chunk(3, -1))
    decay = args[2].reshape(batch, 1, heads, _K).contiguous()
    beta = args[3].reshape(batch, 1, heads).contiguous()
    state = normal(batch, heads, _K, _K, dtype=torch.float32)
    return Work(
        partial(
            fused_recurrent_kda,
            q=q,
            k=k,
            v=v,
            g=decay,
            beta=beta,
            A_log=weights.a_log,
            dt_bias=weights.dt_bias,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            lower_bound=-5.0,
        )
    )


_PREFILL_SIZES = (([8192], 96), ([128] * 64, 96), ([8192], 12), ([1024] * 8, 96), ([2048], 96))


def prefill_cases() -> Iterator[Case]:
    """Packed sequences; bytes are the projections in and the output, the states once."""
    for lengths, heads in _PREFILL_SIZES:
        yield _prefill_case(lengths, heads)


def prefill_part_cases() -> Iterator[Case]:
    """The launches one by one; bytes and operations are the whole op's."""
    for lengths, heads in _PREFILL_SIZES:
        yield _part_case(lengths, heads)


def _places(
    lengths: list[int], heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Windows and states of zeros, cells, cu_seqlens and ends."""
    cells = torch.randperm(len(lengths) * heads, device="cuda").view(len(lengths), heads)
    windows = torch.zeros(cells.numel(), 3, 3, _K, dtype=torch.bfloat16, device="cuda")
    states = torch.zeros(cells.numel(), _K, _K, device="cuda")
    cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    return windows, states, cells, cu_seqlens, cu_seqlens[1:]


def _prefill_case(lengths: list[int], heads: int) -> Case:
    rows, sequences = sum(lengths), len(lengths)
    weights, args = _weights(heads), _inputs(rows, heads)
    windows, states, *places = _places(lengths, heads)
    run = partial(kda_prefill, *args, weights, windows, states, *places)

    def ours() -> torch.Tensor:
        own = torch.zeros_like(windows), torch.zeros_like(states)
        return kda_prefill(*args, weights, *own, *places)

    def want() -> torch.Tensor:
        own = torch.zeros_like(windows, dtype=torch.float32), torch.zeros_like(states)
        return kda_prefill_reference(*_single(args), weights, *own, *places)

    return Case(
        op="kda_prefill",
        shape=f"{sequences} x T{lengths[0]} H{heads} K128, all fused",
        ours=ours,
        timed=run,
        want=want,
        limit=1.2e-2,
        bytes=_prefill_bytes(lengths, heads),
        flops=rows * heads * (6 * _K * _K + 10 * 64 * _K),
        variants={
            name: partial(run, shape=shape) for name, shape in _prefill_shapes(heads).items()
        },
        peers={
            **_prefill_peers(args, weights, places[1], heads),
            **sglang_kda.prefill_peers(args, weights, lengths, heads),
        },
    )


def _prefill_shapes(heads: int) -> dict[str, HopperShape]:
    if heads < 64:
        return {
            "alone": HopperShape(64, 3),
            "alone, early": HopperShape(64, 3, 1e-9),
            "1/2 aside": HopperShape(64, 3, 1 / 2),
            "3/4 aside": HopperShape(64, 3, 3 / 4),
        }
    return {
        "alone": HopperShape(128, 5),
        "alone, fetch": HopperShape(128, 5, fetch=True),
        "alone, backwards": HopperShape(128, 5, backwards=True),
        "alone, both": HopperShape(128, 5, fetch=True, backwards=True),
        "1/10 aside": HopperShape(128, 5, 1 / 10),
        "1/8 aside": HopperShape(128, 5, 1 / 8),
        "1/6 aside": HopperShape(128, 5, 1 / 6),
        "1/5 aside": HopperShape(128, 5, 1 / 5),
        "1/4 aside": HopperShape(128, 5, 1 / 4),
        "1/6 aside, both": HopperShape(128, 5, 1 / 6, fetch=True, backwards=True),
    }


def _prefill_bytes(lengths: list[int], heads: int) -> int:
    return sum(lengths) * heads * _K * 2 * 6 + len(lengths) * heads * 2 * _STATE


def _part_case(lengths: list[int], heads: int) -> Case:
    rows = sum(lengths)
    weights, args = _weights(heads), _inputs(rows, heads)
    places = _places(lengths, heads)

    def prepare(part: str) -> Work:
        _, launches = prefill_launches(*args, weights, *places)
        for launch in launches.values():  # each finds what those before it leave
            launch()
        return Work(launches[part])

    def run() -> torch.Tensor:
        return kda_prefill(*args, weights, *places)

    return Case(
        op="kda_prefill_parts",
        shape=f"{len(lengths)} x T{lengths[0]} H{heads}",
        ours=run,
        want=None,
        limit=1.2e-2,
        bytes=_prefill_bytes(lengths, heads),
        flops=rows * heads * (6 * _K * _K + 10 * 64 * _K),
        variants={
            part: Peer(partial(prepare, part))
            for part in prefill_launches(*args, weights, *places)[1]
        },
    )


def _prefill_peers(
    args: Inputs, weights: KDAWeights, cu_seqlens: torch.Tensor, heads: int
) -> dict[str, Peer]:
    if find_spec("fla") is None:
        return {}
    make = partial(_fla_prefill, args, weights, cu_seqlens, heads)
    return {
        "fla 0.6.0 chunk_kda (no convolution, no output norm)": Peer(partial(make, whole=False)),
        "fla 0.6.0 causal_conv1d + chunk_kda + rms_norm_gated": Peer(partial(make, whole=True)),
    }


def _fla_prefill(
    args: Inputs, weights: KDAWeights, cu_seqlens: torch.Tensor, heads: int, *, whole: bool
) -> Work:
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.ops.kda import chunk_kda

    rows = args[0].shape[0]
    qkv = args[0].contiguous().unsqueeze(0)
    gate = args[1].contiguous().view(1, rows, heads, _K)
    decay = args[2].contiguous().view(1, rows, heads, _K)
    beta = args[3].contiguous().unsqueeze(0)
    state = torch.zeros(cu_seqlens.shape[0] - 1, heads, _K, _K, device="cuda")
    q, k, v = (x.reshape(1, rows, heads, _K).contiguous() for x in qkv.chunk(3, -1))
    host = cu_seqlens.cpu()

    def core(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
        return chunk_kda(
            q=q,
            k=k,
            v=v,
            g=decay,
            beta=beta,
            A_log=weights.a_log,
            dt_bias=weights.dt_bias,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=True,
            lower_bound=-5.0,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=host,
        )[0]

    def layer() -> torch.Tensor:
        y, _ = causal_conv1d(
            qkv, weights.conv.bfloat16(), activation="silu", cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=host,
        )  # fmt: skip
        out = core(*(x.reshape(1, rows, heads, _K) for x in y.chunk(3, -1)))
        out = rms_norm_gated(out, gate, weights.o_norm, None, activation="sigmoid", eps=1e-5)
        return out.reshape(rows, heads * _K)

    return Work(layer, layer) if whole else Work(core)
