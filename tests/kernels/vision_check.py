"""The tower's kernels against float64; started by ``test_vision_device.py`` in its own process.

Triton decides between compiler and interpreter when it is imported. Usage: vision_check.py DEVICE
"""

import sys
from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional as F

from k3vl.kernels.flash import FlashShape
from k3vl.kernels.flash_hopper import hopper_flash
from k3vl.kernels.mla.gpu import mla_prefill_packed
from k3vl.kernels.mla.reference import mla_prefill_reference
from k3vl.kernels.packed import Packed
from k3vl.kernels.recording import GraphRunner
from k3vl.kernels.rms_norm.gpu import NormShape, rms_norm
from k3vl.kernels.vision_attention.gpu import turned_attention, vision_attention
from k3vl.kernels.vision_attention.reference import vision_attention_reference
from k3vl.kernels.vision_block import VisionBlockWeights
from k3vl.kernels.vision_block.gpu import VisionBlockGPU
from k3vl.kernels.vision_pos import rotary_table
from k3vl.kernels.vision_pos.gpu import RotateShape, rotate, rotate_in_place
from k3vl.kernels.vision_pos.reference import rotate_reference

DEVICE = torch.device(sys.argv[1])
ON_GPU = DEVICE.type == "cuda"
DTYPES = (torch.float32, torch.bfloat16) if ON_GPU else (torch.float32,)
EXACT, HALF = 2e-5, 8e-3  # ratio of norms, by width of the operands
BLOCK = VisionBlockGPU(norm=rms_norm, attention=turned_attention)


def bound(dtype: torch.dtype) -> float:
    return EXACT if dtype == torch.float32 else HALF


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def close(what: str, got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    assert got.isfinite().all(), f"{what}: not finite"
    error = float((got.double() - want).norm() / want.norm().clamp_min(1e-30))
    assert error < limit, f"{what}: {error:.2e} against {limit:.0e}"


def columns(x: torch.Tensor) -> torch.Tensor:
    """The same rows as columns of a wider matrix whose other columns are not numbers."""
    wide = x.new_full((x.shape[0], x.shape[1] + 16), float("nan"))
    wide[:, 8:-8] = x
    return wide[:, 8:-8]


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def check_norm(dtype: torch.dtype) -> None:
    for rows, width in ((1, 16), (5, 40), (7, 1024), (3, 7168), (0, 64)):
        x, weight = normal(rows, width, dtype=dtype), normal(width, dtype=dtype)
        for shape in (None, NormShape(4, 2), NormShape(1, 1)):
            got = rms_norm(columns(x), weight, 1e-3, shape=shape)
            close(f"norm {rows}x{width}", got, normed(x, weight, 1e-3), bound(dtype))
    x = normal(2, 3, 48, dtype=dtype)
    assert torch.equal(rms_norm(x, x[0, 0], 1e-6)[1], rms_norm(x[1], x[0, 0], 1e-6))


def check_rotation(dtype: torch.dtype) -> None:
    table = rotary_table(3, 5, 16)
    for heads in (1, 3, 8, 9):
        x = normal(15, heads + 2, 48, dtype=dtype)[:, 1 : heads + 1, 16:32]
        want = rotate_reference(x.cpu(), 3, 5)
        got = rotate(x, table.to(DEVICE))
        close(f"rotation of {heads} heads", got.cpu(), want, bound(dtype))
        for shape in (None, RotateShape(2, 4, 1), RotateShape(16, 2, 4), RotateShape(1, 16, 2)):
            turned = torch.full((15, heads + 2, 48), 7.0, device=DEVICE, dtype=dtype)
            inside = turned[:, 1 : heads + 1, 16:32]
            inside.copy_(x)
            rotate_in_place(inside, table.to(DEVICE), shape=shape)
            assert torch.equal(inside, got), f"{heads} heads where they lie"
            inside.fill_(7.0)
            assert (turned == 7.0).all(), "nothing else is written"


def weights(heads: int, key: int, width: int, inner: int, dtype: torch.dtype) -> VisionBlockWeights:
    def matrix(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device=DEVICE) / shape[1] ** 0.5).to(dtype)

    return VisionBlockWeights(
        heads=heads, attention_norm=normal(width, dtype=dtype), mlp_norm=normal(width, dtype=dtype),
        qkv=matrix(3 * heads * key, width), out=matrix(width, heads * key),
        up=matrix(inner, width), down=matrix(width, inner), eps=1e-3,
    )  # fmt: skip


def by_hand(x: torch.Tensor, w: VisionBlockWeights, rotary: torch.Tensor) -> torch.Tensor:
    """One item in float64."""
    x = x.double()
    qkv = normed(x, w.attention_norm, w.eps) @ w.qkv.double().t()
    q, k, v = qkv.unflatten(-1, (3, w.heads, -1)).unbind(1)
    turns = rotary.to(torch.complex128)[:, None]
    q, k = (
        torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) * turns)
        .flatten(-2)
        for t in (q, k)
    )  # fmt: skip
    scores = torch.einsum("ihk,jhk->hij", q, k) * q.shape[-1] ** -0.5
    mixed = torch.einsum("hij,jhk->ihk", scores.softmax(-1), v).flatten(1)
    x = x + mixed @ w.out.double().t()
    hidden = F.gelu(normed(x, w.mlp_norm, w.eps) @ w.up.double().t(), approximate="tanh")
    return x + hidden @ w.down.double().t()


def check_block(dtype: torch.dtype, grids: list[tuple[int, int]], *sizes: int) -> None:
    """Of several items; recorded too, as the tower is when grids come again."""
    w = weights(*sizes, dtype)
    lengths = [rows * across for rows, across in grids]
    key = sizes[1]
    rotary = torch.cat([rotary_table(*grid, key, device=DEVICE) for grid in grids])
    x = normal(sum(lengths), sizes[2], dtype=dtype)
    parts = zip(x.split(lengths), rotary.split(lengths), strict=True)
    want = torch.cat([by_hand(part, w, turns) for part, turns in parts])
    items = Packed.of(lengths, DEVICE)
    got = BLOCK(x.clone(), w, rotary, items)
    close(f"block {dtype}", got, want, bound(dtype))
    if ON_GPU:
        given = x.clone()
        step = GraphRunner().make(lambda: BLOCK(given, w, rotary, items))
        for _ in range(2):
            given.copy_(x)
            assert torch.equal(step(), got), f"block {dtype}: recorded"


def check_causal() -> None:
    """Keys in two parts; a query behind a prefix has its bits without one."""
    heads, lengths, contexts = 3, (1, 3, 128, 65, 700, 2048), (1, 130, 128, 457, 900, 2048)
    q = normal(sum(lengths), heads, 192, dtype=torch.bfloat16)
    k, v = (normal(sum(contexts), heads, 128, dtype=torch.bfloat16) for _ in range(2))
    shared = normal(sum(contexts), 64, dtype=torch.bfloat16)
    joined = torch.cat([k, shared.unsqueeze(1).expand(-1, heads, -1)], -1)
    parts = list(zip(q.split(lengths), joined.split(contexts), v.split(contexts), strict=True))
    want = torch.cat([mla_prefill_reference(*(x.double() for x in p), 0.07) for p in parts])
    span = {"lengths": lengths, "contexts": contexts}
    packed = partial(mla_prefill_packed, scale=0.07)
    in_triton = packed(q, k, v, shared=shared, **span, shape=FlashShape(128, 64, 8, 3))
    close("causal, in Triton", in_triton, want, HALF)
    got = packed(q, k, v, shared=shared, **span)
    close("causal", got, want, HALF)
    assert torch.equal(packed(q, joined, v, **span), got), "keys in one part"
    alone = [packed(*p, lengths=p[0].shape[:1], contexts=p[1].shape[:1]) for p in parts]
    assert torch.equal(torch.cat(alone), got), "neighbours"
    tokens, keys, values = parts[-1]
    for begin in (1, 77, 1024):
        late = packed(tokens[begin:], keys, values, lengths=(2048 - begin,), contexts=(2048,))
        assert torch.equal(late, got[-2048:][begin:]), f"behind {begin}"


def check_neighbours(dtype: torch.dtype) -> None:
    """Nothing of an item's attention depends on who else is there."""
    lengths = [65, 3, 3, 128, 17, 65, *((1024, 1024, 1024, 2304, 5476) * ON_GPU)]
    heads, key = (12, 128) if ON_GPU else (2, 32)
    tensors = normal(sum(lengths), 3 * heads, key, dtype=dtype).split(heads, 1)
    want = vision_attention_reference(*(t.double() for t in tensors), lengths)
    for shape in (None, *((FlashShape(64, 64, 4, 3),) * (dtype == torch.bfloat16))):
        attend = partial(vision_attention, shape=shape)
        together = attend(*tensors, Packed.of(lengths, DEVICE))
        close(f"attention {dtype}, {shape}", together, want, bound(dtype))
        begin = 0
        for length in lengths:
            own = [t[begin : begin + length] for t in tensors]
            alone = attend(*own, Packed.of([length], DEVICE))
            assert torch.equal(alone, together[begin : begin + length]), f"{shape}: {length}"
            begin += length


def check_programs() -> None:
    """Whichever program of the Gluon kernel takes a tile, its bits are the same."""
    if torch.cuda.get_device_capability() != (9, 0):
        return
    q, k, v = normal(1500, 9, 128, dtype=torch.bfloat16).split(3, 1)
    items = Packed.of([500] * 3, DEVICE)
    for causal in (False, True):
        few, many = (
            hopper_flash(
                q, k, v, 0.1, queries=items, keys=items, causal=causal, rest=None, programs=count
            )
            for count in (5, 132)
        )
        assert torch.equal(few, many), causal


def check_outgrown() -> None:
    """Queries that outgrow the scores of their first keys have the bits of careful ones."""
    lengths = (1024, 300, 2304)
    q, k, v = normal(sum(lengths), 36, 128, dtype=torch.bfloat16).split(12, 1)
    k[1024:1100, 5] *= 120
    items = Packed.of(lengths, DEVICE)
    want = vision_attention_reference(q.float(), k.float(), v.float(), lengths)
    attend = partial(
        hopper_flash, q, k, v, 128**-0.5, queries=items, keys=items, causal=False, rest=None
    )
    careful = attend(fixed=False)
    for ordered in (False, True):
        got = attend(ordered=ordered)
        close("outgrown", got, want, HALF)
        assert torch.equal(got[1024:1324, 5], careful[1024:1324, 5]), ordered


def turned_before(heads: torch.Tensor, turns: torch.Tensor, items: Packed) -> torch.Tensor:
    count = heads.shape[1] // 3
    q, k, v = heads.split(count, 1)
    return vision_attention(rotate(q, turns).contiguous(), rotate(k, turns), v, items)


def check_queries_turned_in_attention() -> None:
    """The block has the same result whoever turns its queries."""
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    grids = [(32, 32), (5, 13), (48, 48)] if ON_GPU else [(2, 3), (5, 4)]
    heads, key, width, inner = (12, 128, 1024, 4096) if ON_GPU else (3, 32, 48, 80)
    lengths = [rows * columns for rows, columns in grids]
    table = torch.cat([rotary_table(rows, columns, key) for rows, columns in grids]).to(DEVICE)
    w, items = weights(heads, key, width, inner, dtype), Packed.of(lengths, DEVICE)
    x = normal(sum(lengths), width, dtype=dtype)
    want = replace(BLOCK, attention=turned_before)(x.clone(), w, table, items)
    close("queries turned in attention", BLOCK(x.clone(), w, table, items), want.double(), 1e-3)


def main() -> None:
    seed = 1
    sys.stdout.write(f"seed {seed}\n")
    torch.manual_seed(seed)
    grids = [(1, 1), (2, 3), (5, 13), (4, 16), (4, 16), (11, 12)]
    for dtype in DTYPES:
        check_norm(dtype)
        check_rotation(dtype)
        check_neighbours(dtype)
        check_block(dtype, grids, 3, 32, 48, 80)
        if ON_GPU:
            check_block(dtype, [(32, 32), (32, 32), (48, 48)], 12, 128, 1024, 4096)
        sys.stdout.write(f"checked {dtype}\n")
    check_queries_turned_in_attention()
    if ON_GPU:
        if torch.cuda.get_device_capability() == (9, 0):
            check_outgrown()
        check_causal()
        check_programs()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
