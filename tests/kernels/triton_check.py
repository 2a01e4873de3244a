"""Triton kernels against float64, one op a run; started by ``test_triton.py`` in its own process.

Triton decides between compiler and interpreter when it is imported. The interpreter multiplies
16-bit floats wrongly, so there everything is float32; on a device both widths are checked. Every
run draws new inputs from a printed seed. "small" leaves out what is long, for a tool that slows
kernels down. Usage: triton_check.py OP DEVICE [small]
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from k3vl.kernels.attn_residual.gpu import FEW, attn_residual
from k3vl.kernels.attn_residual.hopper import cluster_takes
from k3vl.kernels.attn_residual.reference import attn_residual_reference
from k3vl.kernels.choice import reference_kernels, triton_kernels
from k3vl.kernels.hopper import hopper_runs
from k3vl.kernels.kda import KDAWeights
from k3vl.kernels.kda.gpu import (
    CHUNK,
    PrefillShape,
    Snapshots,
    kda_decode,
    kda_prefill,
)
from k3vl.kernels.kda.hopper import HopperShape as KDAHopperShape
from k3vl.kernels.kda.reference import kda_decode_reference, kda_prefill_reference
from k3vl.kernels.mla.gpu import (
    DecodeShape,
    _merge_once,
    mla_decode,
    mla_prefill,
    mla_prefill_latent,
    mla_prefill_packed,
    mla_store,
    mla_values,
)
from k3vl.kernels.mla.hopper import HopperShape
from k3vl.kernels.mla.reference import (
    mla_decode_reference,
    mla_prefill_latent_reference,
    mla_prefill_reference,
    mla_store_reference,
    mla_values_reference,
)
from k3vl.kernels.mla.turned import TurnedShape
from k3vl.kernels.packed import Packed
from k3vl.kernels.pixels import normalise_pixels as normalise_on_cpu
from k3vl.kernels.pixels.gpu import normalise_pixels
from k3vl.kernels.recording import EagerRunner, GraphRunner
from k3vl.kernels.rms_norm.gpu import rms_norm
from k3vl.kernels.vision_attention.gpu import vision_attention
from k3vl.kernels.vision_attention.reference import vision_attention_reference
from k3vl.kernels.vision_pos import rotary_table
from k3vl.kernels.vision_pos.gpu import rotate
from k3vl.kernels.vision_pos.reference import rotate_reference
from k3vl.lm.batch import Row, build_batch
from k3vl.lm.cache import HybridCache, plan_cache
from k3vl.lm.decode import DirectDecode, StaticDecode
from k3vl.lm.model import K3Model
from k3vl.lm.prompts import StaticPrompts
from k3vl.lm.sampler import Sampler
from k3vl.types import SamplingParams
from tests.tiny import TRITON, fill

DEVICE = torch.device(sys.argv[2])
ON_GPU = DEVICE.type == "cuda"
LARGE = ON_GPU and "small" not in sys.argv[3:]
DTYPES = (torch.float32, torch.bfloat16) if ON_GPU else (torch.float32,)
ODD = (1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300)
HOPPER_WHOLE = KDAHopperShape(128, 5)
HOPPER_VARIANT = KDAHopperShape(64, 3)
EXACT, HALF = 2e-5, 8e-3  # ratio of norms, by width of the operands


def bound(dtype: torch.dtype) -> float:
    return EXACT if dtype == torch.float32 else HALF


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def close(what: str, got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    assert got.isfinite().all(), f"{what}: not finite"
    error = float((got.double() - want).norm() / want.norm().clamp_min(1e-30))
    assert error < limit, f"{what}: {error:.2e} against {limit:.0e}"


def poison() -> None:
    """Fresh memory of the library is NaN, so that what nobody writes shows up."""
    empty = torch.empty

    def poisoned(*size: int, **kwargs: object) -> torch.Tensor:
        out = empty(*size, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    torch.empty = poisoned


def untouched_zeros(*shape: int) -> torch.Tensor:
    """Memory that costs nothing until it is written, where the system can."""
    return torch.zeros(shape, device=DEVICE) if ON_GPU else torch.from_numpy(np.zeros(shape, "f4"))


def kda_weights(heads: int, key: int, dtype: torch.dtype = torch.float32) -> KDAWeights:
    return KDAWeights(
        conv=normal(3 * heads * key, 4, dtype=dtype) / 2,
        a_log=normal(heads, dtype=dtype) / 3,
        dt_bias=normal(heads * key, dtype=dtype),
        o_norm=torch.rand(key, device=DEVICE).to(dtype) + 0.5,
        eps=1e-5,
        lower_bound=-5.0,
    )


def wide(weights: KDAWeights, lower_bound: float | None) -> KDAWeights:
    tensors = (weights.conv, weights.a_log, weights.dt_bias, weights.o_norm)
    conv, a_log, dt_bias, o_norm = (x.double() for x in tensors)
    return KDAWeights(
        conv=conv,
        a_log=a_log,
        dt_bias=dt_bias,
        o_norm=o_norm,
        eps=weights.eps,
        lower_bound=lower_bound,
    )


def kda_inputs(rows: int, heads: int, key: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """qkv, gate, decay, write as columns of one projection, with strangers between them."""
    widths = (3 * heads * key, 7, heads * key, heads * key, heads)
    qkv, _, gate, decay, write = normal(rows, sum(widths), dtype=dtype).split(widths, -1)
    return qkv, gate, decay, write


def pool(cells: int, key: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows and states in one strided buffer each, as the engine keeps them."""
    windows = normal(cells, 9 * key + 16, dtype=dtype)[:, : 9 * key].view(cells, 3, 3, key)
    states = normal(cells, key * key + 16)[:, : key * key].view(cells, key, key)
    return windows, states


def check_kda_decode() -> Iterator[str]:
    for dtype in DTYPES:
        for batch, heads, key in ((1, 1, 16), (3, 4, 64), (2, 2, 128)):
            for lower_bound in (-5.0, None):
                weights = wide(kda_weights(heads, key), lower_bound)
                narrow = kda_weights_like(weights)
                args = kda_inputs(batch, heads, key, dtype)
                windows, states = pool(batch * heads + 3, key, dtype)
                order = torch.randperm(batch * heads + 3, device=DEVICE)
                cells = order[: batch * heads].view(batch, heads)
                want_windows, want_states = windows.double(), states.double()
                doubles = [x.double() for x in args]
                want = kda_decode_reference(*doubles, weights, want_windows, want_states, cells)
                got = kda_decode(*args, narrow, windows, states, cells)
                close(f"decode {dtype} H{heads} K{key}", got, want, bound(dtype))
                close("states", states, want_states, EXACT)
                assert torch.equal(windows.double(), want_windows)
                yield f"{dtype} B{batch} H{heads} K{key} bound {lower_bound}"


def kda_weights_like(weights: KDAWeights) -> KDAWeights:
    """The same in float32; ``weights`` is exactly representable after this round trip."""
    return KDAWeights(
        conv=weights.conv.float(),
        a_log=weights.a_log.float(),
        dt_bias=weights.dt_bias.float(),
        o_norm=weights.o_norm.float(),
        eps=weights.eps,
        lower_bound=weights.lower_bound,
    )


def check_kda_decode_hopper() -> Iterator[str]:
    """K3's heads, which Hopper decodes in Gluon: with padding, beside the kernel in Triton."""
    if not ON_GPU:
        yield "not here"
        return
    for heads, batch in ((96, 17), (5, 1)):
        weights, args = kda_weights(heads, 128), kda_inputs(batch, heads, 128, torch.bfloat16)
        windows, states = pool(batch * heads, 128, torch.bfloat16)
        cells = torch.randperm(batch * heads, device=DEVICE).view(batch, heads)
        if batch > 1:
            cells[[3, 16]] = -1
        mine = windows.clone(), states.clone()
        want = kda_decode(*args, weights, windows, states, cells, hopper=False)
        got = kda_decode(*args, weights, *mine, cells)
        close(f"decode B{batch} H{heads}", got, want.double(), HALF)
        close(f"decode B{batch} H{heads}, states", mine[1], states.double(), EXACT)
        assert torch.equal(mine[0], windows)
        yield f"B{batch} H{heads}"


def check_kda_decode_padding() -> Iterator[str]:
    weights = kda_weights(2, 16)
    args = kda_inputs(3, 2, 16, torch.float32)
    for x in args:
        x[1] = float("nan")
    windows, states = pool(7, 16, torch.float32)
    cells = torch.tensor([[0, 1], [-1, -1], [5, 3]], device=DEVICE)
    untouched = [2, 4, 6]
    before = states.clone(), windows.clone()
    out = kda_decode(*args, weights, windows, states, cells)
    assert not out[1].any()
    assert out[[0, 2]].isfinite().all()
    assert torch.equal(states[untouched], before[0][untouched])
    assert torch.equal(windows[untouched], before[1][untouched])
    assert not torch.equal(states[5], before[0][5])
    yield "padding rows answer zero and touch no cell"


def check_kda_decode_large_slots() -> Iterator[str]:
    """A cell whose state lies behind 2^31 elements; the memory between is never touched."""
    key, far = 16, 2**31 // 256 + 7
    states = untouched_zeros(far + 1, key, key)
    weights = kda_weights(1, key)
    args = kda_inputs(2, 1, key, torch.float32)
    windows = untouched_zeros(far + 1, 3, 3, key)
    cells = torch.tensor([[far], [3]], device=DEVICE)
    small = normal(2, key, key)
    states[far], states[3] = small[0], small[1]
    want_states, want_windows = small.double(), torch.zeros(2, 3, 3, key, device=DEVICE).double()
    doubles = [x.double() for x in args]
    order = torch.tensor([[0], [1]], device=DEVICE)
    weights_wide = wide(weights, -5.0)
    want = kda_decode_reference(*doubles, weights_wide, want_windows, want_states, order)
    close("far cell", kda_decode(*args, weights, windows, states, cells), want, EXACT)
    close("far state", states[far], want_states[0], EXACT)
    yield f"cell {far}"


def run_prefill(
    lengths: list[int],
    heads: int,
    key: int,
    dtype: torch.dtype,
    decay: float | None = None,
    scale: float = 1.0,
) -> None:
    weights = kda_weights(heads, key)
    pads = [int(x) for x in torch.randint(0, 3, (len(lengths),))]
    pads = [p if n else p + 1 for n, p in zip(lengths, pads, strict=True)]
    pads[-1] = 70  # a whole chunk of padding
    starts = torch.tensor([0, *(n + p for n, p in zip(lengths, pads, strict=True))]).cumsum(0)
    cu_seqlens = starts.to(DEVICE)
    ends = (starts[:-1] + torch.tensor(lengths)).to(DEVICE)
    args = kda_inputs(int(starts[-1]), heads, key, dtype)
    args[0].mul_(scale)
    if decay is not None:
        args[2].fill_(decay)
    for begin, end in zip(ends.tolist(), starts[1:].tolist(), strict=True):
        for x in args:
            x[begin:end] = float("nan")
    windows, states = pool(len(lengths) * heads + 3, key, dtype)
    order = torch.randperm(len(lengths) * heads + 3, device=DEVICE)
    cells = order[: len(lengths) * heads].view(-1, heads)
    want_windows, want_states = windows.double(), states.double()
    clean = [x.double().nan_to_num() for x in args]
    reference = (wide(weights, -5.0), want_windows, want_states, cells, cu_seqlens, ends)
    want = kda_prefill_reference(*clean, *reference)
    shapes: list[PrefillShape | KDAHopperShape | None] = [None]
    if LARGE and dtype != torch.float32:
        shapes += [PrefillShape(64, 4, 3, 128), PrefillShape(key // 2, 4, 4, 168)]
        shapes += [PrefillShape(key, 8, 3, 168)]
    elif not ON_GPU and key == 32:
        shapes += [PrefillShape(16, 4, 1, None)]
    hopper = ON_GPU and torch.cuda.get_device_capability() == (9, 0)
    if hopper and dtype == torch.bfloat16 and key == 128:
        shapes += [HOPPER_WHOLE, HOPPER_VARIANT]  # with so few heads the default has halves
    for shape in shapes:
        own_windows, own_states = windows.clone(), states.clone()
        batch = (weights, own_windows, own_states, cells, cu_seqlens, ends)
        got = kda_prefill(*args, *batch, shape=shape)
        what = f"prefill {dtype} K{key} {lengths} decay {decay} {shape}"
        close(what, got, want, 1.2e-2 if dtype != torch.float32 else EXACT)
        close(f"{what}, states", own_states, want_states, bound(dtype))
        assert torch.equal(own_windows.double(), want_windows), what


def check_kda_prefill() -> Iterator[str]:
    if not ON_GPU:
        run_prefill([1, 2, 3, 15, 16, 17], 1, 16, torch.float32)
        run_prefill([63, 64, 65], 1, 16, torch.float32)
        run_prefill([129], 1, 32, torch.float32)
        run_prefill([5, 0, 33, 0, 0], 1, 16, torch.float32)
        yield "short and odd lengths, and sequences of padding alone"
        for decay in (30.0, -30.0):  # log-decay at -5, and at 0
            run_prefill([128, 20], 1, 16, torch.float32, decay)
        run_prefill([70], 1, 16, torch.float32, 30.0, 1e-2)
        yield "decay -5 and 0"
        return
    for dtype, heads, key in (
        (torch.bfloat16, 3, 128),
        (torch.bfloat16, 4, 64),
        (DTYPES[0], 4, 64),
    ):
        run_prefill(list(ODD) if LARGE else [1, 2, 17, 33, 65], heads, key, dtype)
        run_prefill([5, 0, 33, 0, 0], heads, key, dtype)
        for decay in (30.0, -30.0, 0.0) * LARGE:
            run_prefill([1000, 64, 7], heads, key, dtype, decay)
        for decay in (30.0, 0.0):  # short keys
            run_prefill([200, 64], heads, key, dtype, decay, 1e-2)
        yield f"{dtype} K{key}, every length, long sequences, three decays"


def check_kda_snapshots() -> Iterator[str]:
    """States on the way are what a sequence of that length leaves behind."""
    dtype = DTYPES[-1]
    heads, key, length = 1, 16 if not ON_GPU else 128, 140
    weights = kda_weights(heads, key)
    args = kda_inputs(length + 5, heads, key, dtype)
    windows, states = pool(6, key, dtype)
    cells = torch.tensor([[1], [4]], device=DEVICE)
    cu_seqlens = torch.tensor([0, 5, length + 5], device=DEVICE)
    depths = torch.tensor([[0, 0], [2 * CHUNK, CHUNK]], device=DEVICE)
    where = torch.tensor([[[0], [0]], [[2], [5]]], device=DEVICE)
    shapes: list[KDAHopperShape | None] = [None]
    if ON_GPU and torch.cuda.get_device_capability() == (9, 0):
        shapes += [HOPPER_WHOLE]
    for shape in shapes:
        own = windows.clone(), states.clone()
        batch = (weights, *own, cells, cu_seqlens, cu_seqlens[1:])
        kda_prefill(*args, *batch, snapshots=Snapshots(depths, where), shape=shape)
        for depth, cell in ((2 * CHUNK, 2), (CHUNK, 5)):
            part = [x[5 : 5 + depth] for x in args]
            alone = windows.clone(), states.clone()
            span = torch.tensor([0, depth], device=DEVICE)
            kda_prefill(*part, weights, *alone, cells[1:], span, span[1:], shape=shape)
            assert torch.equal(own[1][cell], alone[1][4]), depth
            assert torch.equal(own[0][cell], alone[0][4]), depth
        assert torch.equal(own[1][0], states[0])
        yield f"depths {CHUNK} and {2 * CHUNK}, {shape}"


def check_kda_pieces() -> Iterator[str]:
    """A sequence in pieces of whole chunks has the bits of one that is not."""
    dtype, heads, key = DTYPES[-1], 2, 16 if not ON_GPU else 128
    shapes: list[PrefillShape | KDAHopperShape | None] = [None]
    lengths = [140]
    if ON_GPU and torch.cuda.get_device_capability() == (9, 0):
        shapes += [HOPPER_WHOLE, HOPPER_VARIANT]
        lengths += [2200]  # the default prepares a part of it beside the walk
    weights, cells = kda_weights(heads, key), torch.tensor([[1, 0]], device=DEVICE)
    windows, states = pool(2, key, dtype)
    for length in lengths:
        args = kda_inputs(length, heads, key, dtype)
        for shape in shapes:
            whole, parts = ((windows.clone(), states.clone()) for _ in range(2))
            span = torch.tensor([0, length], device=DEVICE)
            want = kda_prefill(*args, weights, *whole, cells, span, span[1:], shape=shape)
            got = []
            for begin, end in ((0, CHUNK), (CHUNK, 3 * CHUNK), (3 * CHUNK, length)):
                piece = [x[begin:end] for x in args]
                span = torch.tensor([0, end - begin], device=DEVICE)
                got.append(kda_prefill(*piece, weights, *parts, cells, span, span[1:], shape=shape))
            assert torch.equal(torch.cat(got), want), shape
            assert torch.equal(parts[0], whole[0]), shape
            assert torch.equal(parts[1], whole[1]), shape
            yield f"{length} tokens, {shape}"


def check_mla_decode() -> Iterator[str]:
    for dtype in DTYPES:
        for heads, latent, shared in ((4, 128, 16), (96, 512, 64))[: 2 if ON_GPU else 1]:
            lengths = torch.tensor([1, 33, 90, 65], device=DEVICE)
            latents = normal(500, latent + shared, dtype=dtype)
            rows = torch.randperm(499, device=DEVICE)[: 4 * 90].view(4, 90)
            latents[499] = float("nan")
            for b, length in enumerate(lengths.tolist()):
                rows[b, length:] = 499
            q = normal(4, heads, latent + shared, dtype=dtype)
            want = mla_decode_reference(q.double(), latents.double(), rows, lengths, latent, 0.1)
            half = dtype != torch.float32
            block = 16 if heads < 64 or not half else 64
            ways = ((1, 1), (1, 4), (3, 4), (1, 7))
            shapes = [None, *(DecodeShape(block, 16, 4, *way) for way in ways)]
            for shape in shapes:
                got = mla_decode(q, latents, rows, lengths, latent, 0.1, shape=shape)
                close(f"mla_decode {dtype} {shape}", got, want, bound(dtype))
            yield f"{dtype} H{heads} R{latent}, NaN in unused rows"


def check_mla_decode_pages() -> Iterator[str]:
    """Pages of a table, rows by columns or columns by rows; unused pages and entries are NaN."""
    heads, latent, shared = 3, 32, 16
    for dtype in DTYPES:
        for page in (16, 48, 64):
            lengths = torch.tensor([1, 0, page, page + 1, 3 * page - 1, 2 * page], device=DEVICE)
            batch, most = len(lengths), 5
            latents = normal(batch * most * (page + 7), latent + shared, dtype=dtype)
            begins = torch.randperm(batch * most, device=DEVICE).view(batch, most) * (page + 7)
            unused = torch.ones(len(latents), dtype=torch.bool, device=DEVICE)
            for b, length in enumerate(lengths.tolist()):
                for t in range(length):
                    unused[begins[b, t // page] + t % page] = False
            latents[unused] = float("nan")
            begins[1] = 2**62  # a padding row's table is never read
            clean = begins.clone()
            clean[1] = 0
            q = normal(batch, heads, latent + shared, dtype=dtype)
            q[1] = 1.0
            args = (latents.double().nan_to_num(), clean, lengths, latent, 0.2, page)
            want = mla_decode_reference(q.double(), *args)
            ways = ((1, 1), (3, 1), (1, 3), (3, 40))
            for table in (begins, begins.T.contiguous().T):
                for shape in (None, *(DecodeShape(16, 16, 4, *way) for way in ways)):
                    got = mla_decode(q, latents, table, lengths, latent, 0.2, page, shape=shape)
                    close(f"pages of {page} {dtype} {shape}", got, want, bound(dtype))
                    assert not got[1].any(), "padding gets zeros"
        yield f"{dtype} pages of 16, 48 and 64; NaN in all that is not used"


def check_mla_decode_merge() -> Iterator[str]:
    """Parts added in one go: some are empty; a row may have none that is not."""
    for dtype in DTYPES:
        for splits in (2, 3, 4, 12, 32, 64, 66):
            parts, weights = normal(3, splits, 4, 256), 30 * normal(3, 4, splits)
            weights[0, :, 1:] = weights[1] = float("-inf")
            parts[weights.mT.isneginf()] = 0.0
            share = (weights.double() * math.log(2)).softmax(-1).nan_to_num()
            want = (share.mT.unsqueeze(-1) * parts.to(dtype).double()).sum(1)
            out = torch.full((3, 4, 256), float("nan"), device=DEVICE, dtype=dtype)
            _merge_once(parts.to(dtype), weights, out, early=ON_GPU)
            close(f"merge of {splits} {dtype}", out, want, bound(dtype))
            assert not out[1].any(), "padding gets zeros"
        yield f"{dtype} 2 to 66 parts"


def check_mla_decode_hopper() -> Iterator[str]:
    """On a device only; ``test_mla_hopper.py`` has what a CPU can show."""
    if not ON_GPU or torch.cuda.get_device_capability() != (9, 0):
        yield "not compute capability 9.0"
        return
    heads, page = 96, 64
    lengths = torch.tensor([1, 0, 64, 65, 191, 129, 256, 4097], device=DEVICE)
    batch, most = len(lengths), 65
    latents = normal(batch * most * (page + 7), 576, dtype=torch.bfloat16)
    begins = torch.randperm(batch * most, device=DEVICE).view(batch, most) * (page + 7)
    used = torch.zeros(len(latents), dtype=torch.bool, device=DEVICE)
    for b, length in enumerate(lengths.tolist()):
        t = torch.arange(length, device=DEVICE)
        used[begins[b, t // page] + t % page] = True
    latents[~used] = float("nan")
    clean = begins.clone()
    begins[1] = 2**62
    q = normal(batch, heads, 576, dtype=torch.bfloat16)
    args = (latents.double().nan_to_num(), clean, lengths, 512, 0.07, page)
    want = mla_decode_reference(q.double(), *args)
    for shape in (None, *(HopperShape(splits) for splits in (1, 2, 3, 5, 64, 66))):
        for _ in range(20 if LARGE else 2):  # whatever the order of the warps
            got = mla_decode(q, latents, begins, lengths, 512, 0.07, page, shape=shape)
            close(f"{shape}", got, want, bound(torch.bfloat16))
            assert not got[1].any(), "padding gets zeros"
    yield "1 to 66 parts, NaN in all that is not used"
    for size in (1.0, 60.0):  # the larger scores are, the further on, so that references are raised
        larger = torch.linspace(1.0, size, page + 7, device=DEVICE).repeat(batch * most)[:, None]
        grown = (latents.float() * larger).bfloat16()
        want = mla_decode_reference(q.double(), grown.double().nan_to_num(), *args[1:])
        for splits in (1, 2, 3, 4, 9):
            for _ in range(20 if LARGE else 2):
                shape = TurnedShape(splits)
                got = mla_decode(q, grown, begins, lengths, 512, 0.07, page, shape=shape)
                close(f"{shape}, {size}", got, want, bound(torch.bfloat16))
                assert not got[1].any(), "padding gets zeros"
    yield "turned, 1 to 9 parts, NaN in all that is not used, references raised"


def check_mla_store() -> Iterator[str]:
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, latent, shared in ((1, 16, 16), (3, 12, 4), (65, 512, 64), (17, 40, 1)):
            c, _, tail = normal(tokens, latent + 9 + shared, dtype=dtype).split(
                (latent, 9, shared), -1
            )
            norm = (torch.rand(latent, device=DEVICE) + 0.5).to(dtype)
            pool = normal(tokens + 5, 2, latent + shared, dtype=dtype)[:, 0]  # rows lie apart
            rows = torch.randperm(tokens + 5, device=DEVICE)[:tokens]
            if tokens > 1:
                c[1], tail[1] = float("nan"), float("nan")
                rows[1] = -1
            want = pool.double()
            clean = c.double().nan_to_num(), tail.double().nan_to_num()
            mla_store_reference(*clean, norm.double(), 1e-6, want, rows)
            mla_store(c, tail, norm, 1e-6, pool, rows)
            close(f"store {dtype} {tokens} x {latent} + {shared}", pool, want, bound(dtype))
            behind = rows[rows >= 0]
            assert torch.equal(pool[behind, latent:], tail[rows >= 0])
            others = torch.ones(tokens + 5, dtype=torch.bool, device=DEVICE)
            others[behind] = False
            assert torch.equal(pool[others].double(), want[others]), "others' rows stay"
        yield f"{dtype} with padding and rows apart"
    far = 2**31 // 32 + 7
    pool = untouched_zeros(far + 1, 32)
    c, tail, norm = normal(1, 16), normal(1, 16), torch.ones(16, device=DEVICE)
    mla_store(c, tail, norm, 1e-6, pool, torch.tensor([far], device=DEVICE))
    want = untouched_zeros(1, 32).double()
    first = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    mla_store_reference(c.double(), tail.double(), norm.double(), 1e-6, want, first)
    close("far row", pool[far:], want, EXACT)
    yield f"row {far}"


def check_mla_values() -> Iterator[str]:
    for dtype in DTYPES:
        sizes = ((1, 3, 32, 16), (15, 2, 64, 32), (17, 3, 128, 24), (65, 2, 16, 65), (3, 1, 256, 1))
        for batch, heads, latent, width in (*sizes, *((32, 96, 512, 128),) * ON_GPU):
            mixed = normal(batch, heads, latent, dtype=dtype)
            kv_b = normal(heads, 7 + width, latent, dtype=dtype) / latent**0.5
            gate = normal(batch, heads * width + 5, dtype=dtype)[:, : heads * width]
            for logits in (gate, None):
                wide = None if logits is None else logits.double()
                want = mla_values_reference(mixed.double(), kv_b[:, 7:].double(), wide)
                got = mla_values(mixed, kv_b[:, 7:], logits)
                close(f"values {dtype} B{batch} R{latent} V{width}", got, want, bound(dtype))
        yield f"{dtype} gated and not"


def check_mla_prefill() -> Iterator[str]:
    sizes = ((1, 1), (2, 3), (15, 16), (17, 129), (65, 65))
    for dtype in DTYPES:
        for queries, keys in (*sizes, *((3, 70), (127, 128), (300, 300), (129, 1000)) * LARGE):
            nope, shared, value = (128, 64, 128) if ON_GPU else (32, 16, 32)
            q, k = (
                normal(queries, 2, nope + shared, dtype=dtype),
                normal(keys, 2, nope, dtype=dtype),
            )
            tail, v = normal(keys, shared, dtype=dtype), normal(keys, 2, value, dtype=dtype)
            joined = torch.cat([k, tail.unsqueeze(1).expand(-1, 2, -1)], -1)
            want = mla_prefill_reference(q.double(), joined.double(), v.double(), 0.1)
            close(f"expanded {queries}/{keys}", mla_prefill(q, joined, v, 0.1), want, bound(dtype))
            span = {"lengths": (queries,), "contexts": (keys,)}
            got = mla_prefill_packed(q, k, v, 0.1, shared=tail, **span)
            close(f"shared part {queries}/{keys}", got, want, bound(dtype))
            assert torch.equal(mla_prefill(q, k, v, 0.1, tail), got), "packed or not"
            q, context = normal(queries, 2, 48, dtype=dtype), normal(keys, 48, dtype=dtype)
            want = mla_prefill_latent_reference(q.double(), context.double(), 32, 0.1)
            got = mla_prefill_latent(q, context, 32, 0.1)
            close(f"latent {queries}/{keys}", got, want, bound(dtype))
        if dtype == torch.bfloat16:  # the width of K3's latents
            q, context = normal(70, 3, 576, dtype=dtype), normal(200, 576, dtype=dtype)
            want = mla_prefill_latent_reference(q.double(), context.double(), 512, 0.05)
            got = mla_prefill_latent(q, context, 512, 0.05)
            close("latent, 512 + 64", got, want, bound(dtype))
        yield f"{dtype} one sequence"
        lengths, contexts = (3, 1, 64), (3, 70, 65)
        q, k, v = (
            normal(68, 2, 32, dtype=dtype),
            normal(138, 2, 32, dtype=dtype),
            normal(138, 2, 32, dtype=dtype),
        )
        got = mla_prefill_packed(q, k, v, 0.2, lengths=lengths, contexts=contexts)
        parts = zip(q.split(lengths), k.split(contexts), v.split(contexts), strict=True)
        want = torch.cat([mla_prefill_reference(*(x.double() for x in p), 0.2) for p in parts])
        close("packed", got, want, bound(dtype))
        q, k, v = (normal(9, 2, width, dtype=dtype) for width in (64, 48, 32))
        tail = normal(9, 16, dtype=dtype)
        joined = torch.cat([k, tail.unsqueeze(1).expand(-1, 2, -1)], -1)
        want = mla_prefill_reference(q.double(), joined.double(), v.double(), 0.1)
        close("48 + 16", mla_prefill(q, k, v, 0.1, tail), want, bound(dtype))
        yield f"{dtype} packed, widths that are no powers of two"
        q, context = normal(68, 2, 48, dtype=dtype), normal(150, 48, dtype=dtype)
        borders = tuple(torch.tensor([0, *n], device=DEVICE).cumsum(0) for n in (lengths, contexts))
        want = mla_prefill_latent_reference(q.double(), context.double(), 32, 0.1, borders)
        got = mla_prefill_latent(q, context, 32, 0.1, borders)
        close("latent, several sequences", got, want, bound(dtype))
        yield f"{dtype} latents of several sequences"


def check_attn_residual() -> Iterator[str]:
    for dtype in (torch.float32, torch.bfloat16):
        for depth, tokens, width in (
            (1, 1, 7),
            (2, 3, 64),
            (9, 2, 200),
            *((*((9, t, 7168) for t in (1, FEW, 70)), (16, 3, 8192), (1, 5, 320)) * ON_GPU),
            *(((9, 300, 7168),) * LARGE),
        ):
            rows = normal(depth, tokens, width + 8, dtype=dtype)[..., :width]
            query, norm = normal(width) / 4, torch.rand(width, device=DEVICE) + 0.5
            ways: list[dict[str, Any]] = [{}]
            if tokens <= FEW and hopper_runs(DEVICE) and cluster_takes(rows, query, norm):
                ways.append({"warps": 8})
            for weight in (norm, norm.to(dtype)):
                want = attn_residual_reference(rows.double(), query.double(), weight.double(), 1e-5)
                for way in ways:
                    got = attn_residual(rows, query, weight, 1e-5, **way)
                    close(f"{dtype} R{depth} N{tokens} D{width} {way}", got, want, bound(dtype))
            got = attn_residual(rows, query, norm, 1e-5)
            same = attn_residual(rows[:, -1:], query, norm, 1e-5)
            assert tokens > FEW or torch.equal(got[-1:], same), "bits of a token beside others"
            if LARGE:
                step = GraphRunner().make(
                    lambda given=rows, query=query, norm=norm: attn_residual(
                        attn_residual(given, query, norm, 1e-5)[None], query, norm, 1e-5
                    )
                )
                assert torch.equal(step(), attn_residual(got[None], query, norm, 1e-5)), "recorded"
        yield f"{dtype}"


def check_vision() -> Iterator[str]:
    for dtype in DTYPES:
        for heads, key in ((2, 32), *((12, 128), (4, 64)) * ON_GPU):
            lengths = [1, 3, 16, 17, 64, 129, *((1000, 5476) * LARGE)]
            q, k, v = normal(sum(lengths), 3 * heads, key, dtype=dtype).split(heads, 1)
            want = vision_attention_reference(q.double(), k.double(), v.double(), lengths)
            got = vision_attention(q, k, v, Packed.of(lengths, q.device))
            close(f"attention {dtype} K{key}", got, want, bound(dtype))
        x = normal(12, 5, 48, dtype=dtype)[:, :3, 16:32]
        table = rotary_table(3, 4, 16)
        want = rotate_reference(x.cpu(), 3, 4)
        close("rotary", rotate(x, table.to(DEVICE)).cpu(), want, bound(dtype))
        x, weight = normal(5, 1024, dtype=dtype), normal(1024, dtype=dtype)
        want = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-3).rsqrt()
        close("norm", rms_norm(x, weight, 1e-3), want * weight.double(), bound(dtype))
        yield f"{dtype}"


def check_pixels() -> Iterator[str]:
    pixels = torch.randint(0, 256, (37, 3, 14, 14), dtype=torch.uint8, device=DEVICE)
    mean, deviation = torch.rand(3, device=DEVICE), torch.rand(3, device=DEVICE) + 0.1
    want = normalise_on_cpu(pixels.cpu(), mean.cpu(), deviation.cpu(), torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        got = normalise_pixels(pixels, mean, deviation, dtype)
        close(f"{dtype}", got.cpu(), want, bound(dtype))
        yield f"{dtype}"


def check_decode_step() -> Iterator[str]:
    """Whole steps of a tiny K3 on fixed memory, as graphs where there are any: growing, padded."""
    reference, ours = (
        K3Model(TRITON, kernels, dtype=torch.float32, device=DEVICE).eval()
        for kernels in (reference_kernels("a check"), triton_kernels("a check"))
    )
    fill(reference)
    ours.load_state_dict(reference.state_dict())
    sizes = plan_cache(TRITON, torch.float32, budget_bytes=2**21, page_size=16)
    caches = [HybridCache(TRITON, sizes, dtype=torch.float32, device=DEVICE) for _ in range(2)]
    for cache in caches:
        cache.buffer.view(torch.float32).fill_(float("nan"))
    units = iter(torch.randperm(sizes.num_units).tolist())
    rows = [
        Row(
            token_ids=[number],
            context_len=0,
            slot=[next(units) for _ in range(sizes.units_per_slot)],
            pages=[next(units) for _ in range(2)],
        )
        for number in range(5)
    ]
    for cache in caches:
        for row in rows:
            cache.clear(row.slot)
    static = StaticDecode(ours, caches[0], GraphRunner() if ON_GPU else EagerRunner())
    direct = DirectDecode(reference, caches[1])
    for step in range(20 if ON_GPU else 4):
        count = (1, 3, 5, 2)[step % 4]
        kinds = [{"temperature": 1.0, "seed": step}, {"logprobs": 2}, {}]
        params = [SamplingParams(**kinds[i % 3]) for i in range(count)]
        samplers = [[Sampler(p) for p in params] for _ in range(2)]
        got = static.launch(rows[:count], samplers[0]).tokens()
        assert got == direct.launch(rows[:count], samplers[1]).tokens(), f"step {step} of {count}"
        for mine, theirs in zip(*samplers, strict=True):
            if mine.logprobs is not None:
                assert abs(mine.logprobs.logprob - theirs.logprobs.logprob) < 1e-3
        for i, token in enumerate(got):
            row = replace(rows[i], token_ids=[token], context_len=rows[i].context_len + 1)
            rows[i] = row
        mine, theirs = (cache.units[[u for r in rows for u in r.slot]] for cache in caches)
        mine, theirs = (x.view(torch.float32) for x in (mine, theirs))
        close("states and windows", mine, theirs.double(), 1e-4)
    owned = {unit for row in rows for unit in (*row.slot, *row.pages)}
    free = [unit for unit in range(sizes.num_units) if unit not in owned]
    assert caches[0].units[free].view(torch.float32).isnan().all(), "nobody's units stay"
    yield "steps of 1, 3, 5 and 2 rows"


def check_prefill_pass() -> Iterator[str]:
    """Prompts that share a pass, padded to whole tiles, beside each by itself: twice, so that the
    second pass goes on where the first has ended."""
    reference, ours = (
        K3Model(TRITON, kernels, dtype=torch.float32, device=DEVICE).eval()
        for kernels in (reference_kernels("a check"), triton_kernels("a check"))
    )
    fill(reference)
    ours.load_state_dict(reference.state_dict())
    sizes = plan_cache(TRITON, torch.float32, budget_bytes=2**21, page_size=16)
    together, alone, fixed = (
        HybridCache(TRITON, sizes, dtype=torch.float32, device=DEVICE) for _ in range(3)
    )
    fixed.buffer.view(-1, sizes.unit_bytes)[fixed.spare] = 255  # as numbers NaN
    static = StaticPrompts(ours, fixed, GraphRunner() if ON_GPU else EagerRunner())
    units = iter(torch.randperm(sizes.num_units).tolist())
    lengths = [(16, 7), (48, 40), (32, 1), (16, 16)]
    slots = [[next(units) for _ in range(sizes.units_per_slot)] for _ in lengths]
    pages = [[next(units) for _ in range(6)] for _ in lengths]
    for turn in range(2):
        rows = [
            Row(
                token_ids=torch.randint(0, TRITON.vocab_size, (length[turn],)).tolist(),
                context_len=turn * length[0],
                slot=slot,
                pages=own,
                pad_to=-(-length[turn] // 16) * 16,
            )
            for length, slot, own in zip(lengths, slots, pages, strict=True)
        ]
        got = ours(build_batch(rows, together), together)
        want = [reference(build_batch([replace(r, pad_to=0)], alone), alone) for r in rows]
        close(f"logits of pass {turn}", got, torch.cat(want).double(), 1e-4)
        mine, theirs = (
            cache.units[[unit for slot in slots for unit in slot]] for cache in (together, alone)
        )
        mine, theirs = (x.view(torch.float32) for x in (mine, theirs))
        close(f"states and windows of pass {turn}", mine, theirs.double(), 1e-4)
        if not turn:
            fixed.units.copy_(together.units)
    yield "four prompts, twice"
    before, some, times = fixed.units.clone(), [0, 2, 3], []
    for _ in range(3 if ON_GPU else 1):  # launched, recorded, repeated
        fixed.units.copy_(before)
        times.append(static.run([rows[i] for i in some]))
    assert all(torch.equal(times[0], other) for other in times)
    close("logits of a fixed size", times[0], torch.cat([want[i] for i in some]).double(), 1e-4)
    mine, theirs = (
        cache.units[[unit for i in some for unit in slots[i]]] for cache in (fixed, alone)
    )
    mine, theirs = (x.view(torch.float32) for x in (mine, theirs))
    close("states and windows of a fixed size", mine, theirs.double(), 1e-4)
    yield "three prompts at a fixed size"


CHECKS: dict[str, tuple[Callable[[], Iterator[str]], ...]] = {
    "kda_decode": (
        check_kda_decode,
        check_kda_decode_hopper,
        check_kda_decode_padding,
        check_kda_decode_large_slots,
    ),
    "kda_prefill": (check_kda_prefill,),
    "kda_pieces": (check_kda_snapshots, check_kda_pieces),
    "mla_decode": (
        *(check_mla_decode, check_mla_decode_pages, check_mla_decode_hopper),
        *(check_mla_decode_merge, check_mla_store, check_mla_values),
    ),
    "mla_prefill": (check_mla_prefill,),
    "attn_residual": (check_attn_residual,),
    "decode_step": (check_decode_step,),
    "prefill_pass": (check_prefill_pass,),
    "vision": (check_vision, check_pixels),
}


def main() -> None:
    seed = 1
    sys.stdout.write(f"seed {seed}\n")
    torch.manual_seed(seed)
    poison()
    for check in CHECKS[sys.argv[1]]:
        for line in check():
            sys.stdout.write(f"{check.__name__} {line}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
