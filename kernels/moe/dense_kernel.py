"""The grouped products of ``experts_kernel.py`` over weights that are not packed.

For small checkpoints, whose experts are kept in the model's own dtype. Triton reads a kernel's
annotations, so its arguments have none but ``constexpr``.
"""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from k3vl.kernels.moe.experts_kernel import _glu


@triton.jit
def gate_up_dense_kernel(
    x, w, order, tile_expert, tile_first, tile_end, tile_count, out, top_k, beta, linear_beta,
    WIDTH: tl.constexpr, INNER: tl.constexpr, SITU: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """``out[pair] = glu(W1 x, W3 x)``; x [N, WIDTH], w [E, 2 INNER, WIDTH], out in sorted order."""
    tile = tl.program_id(1)
    if tile >= tl.load(tile_count):
        return
    expert = tl.load(tile_expert + tile)
    o_p = tl.load(tile_first + tile) + tl.arange(0, BN)
    there = o_p < tl.load(tile_end + tile)
    token = (tl.load(order + o_p, there, 0) // top_k).to(tl.int64)
    o_f = tl.program_id(0) * BM + tl.arange(0, BM)
    live = o_f < INNER
    w_at = w + (expert.to(tl.int64) * (2 * INNER) + o_f)[:, None] * WIDTH
    gate = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    for k in range(0, WIDTH, BK):
        o_k = k + tl.arange(0, BK)
        inside = o_k < WIDTH
        here = live[:, None] & inside[None, :]
        tokens = tl.load(
            x + token[None, :] * WIDTH + o_k[:, None], inside[:, None] & there[None, :], 0
        )
        gate = tl.dot(tl.load(w_at + o_k[None, :], here, 0), tokens, gate, input_precision="ieee")
        w_up = tl.load(w_at + INNER * WIDTH + o_k[None, :], here, 0)
        up = tl.dot(w_up, tokens, up, input_precision="ieee")
    y = _glu(gate, up, beta, linear_beta, SITU)
    to = out + o_p[None, :].to(tl.int64) * INNER + o_f[:, None]
    tl.store(to, y.to(out.dtype.element_ty), live[:, None] & there[None, :])


@triton.jit
def down_dense_kernel(
    h, w, order, tile_expert, tile_first, tile_end, tile_count, out,
    INNER: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """``out[pair] = W2 h``; h [N k, INNER] in sorted order, w [E, WIDTH, INNER], out by pair."""
    tile = tl.program_id(1)
    if tile >= tl.load(tile_count):
        return
    expert = tl.load(tile_expert + tile)
    o_p = tl.load(tile_first + tile) + tl.arange(0, BN)
    there = o_p < tl.load(tile_end + tile)
    o_f = tl.program_id(0) * BM + tl.arange(0, BM)
    live = o_f < WIDTH
    w_at = w + (expert.to(tl.int64) * WIDTH + o_f)[:, None] * INNER
    acc = tl.zeros([BM, BN], tl.float32)
    for k in range(0, INNER, BK):
        o_k = k + tl.arange(0, BK)
        inside = o_k < INNER
        rows = tl.load(
            h + o_p[None, :].to(tl.int64) * INNER + o_k[:, None],
            inside[:, None] & there[None, :],
            0,
        )
        weights = tl.load(w_at + o_k[None, :], live[:, None] & inside[None, :], 0)
        acc = tl.dot(weights, rows, acc, input_precision="ieee")
    pair = tl.load(order + o_p, there, 0).to(tl.int64)
    to = out + pair[None, :] * WIDTH + o_f[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), live[:, None] & there[None, :])
