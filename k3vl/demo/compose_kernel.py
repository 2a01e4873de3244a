"""The composer as one Triton kernel; ``compose.paint_reference`` is its definition.

Imported only where there is a CUDA device (or the Triton interpreter). Triton reads a kernel's
annotations, so its arguments have none but ``constexpr``.
"""
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _tap(src, base, u, v, on, WIDTH: tl.constexpr, HEIGHT: tl.constexpr):
    """One texel, zero outside the image and outside ``on``."""
    inside = on & (u >= 0) & (u < WIDTH) & (v >= 0) & (v < HEIGHT)
    return tl.load(src + base + v * WIDTH + u, inside, 0)


@triton.jit
def paint_kernel(
    atlas,
    at,
    geometry,
    colour,
    strips,
    strip_geometry,
    strip_colour,
    ground,
    out,
    slot,
    H,
    W,
    K: tl.constexpr,
    CELL: tl.constexpr,
    STRIP_W: tl.constexpr,
    STRIP_H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program draws BLOCK pixels of one picture: every sprite in order, then the strip.

    atlas int32 RGBA premultiplied; at [N, K] int32 offsets; geometry [N, K, 5]; colour
    [N, K, 3, 4]; strips [N, STRIP_H, STRIP_W] uint8; strip_geometry [N, 6]; strip_colour
    [N, 2, 3]; ground, out [N, 3, H, W]; slot [N, H, W] uint8.
    """
    n = tl.program_id(0)
    o_p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    P = H * W
    live = o_p < P
    y = (o_p // W).to(tl.float32) + 0.5
    x = (o_p % W).to(tl.float32) + 0.5
    base = n.to(tl.int64) * 3 * P
    r = tl.load(ground + base + o_p, live, 0).to(tl.float32)
    g = tl.load(ground + base + P + o_p, live, 0).to(tl.float32)
    b = tl.load(ground + base + 2 * P + o_p, live, 0).to(tl.float32)
    top = tl.full([BLOCK], 0, tl.int32) + K + 1
    for k in range(K):
        i = n * K + k
        offset = tl.load(at + i)
        size = tl.load(geometry + i * 5 + 2)
        if (offset >= 0) & (size > 0):
            angle = tl.load(geometry + i * 5 + 3)
            c = tl.cos(angle) / size
            s = tl.sin(angle) / size
            flip = tl.load(geometry + i * 5 + 4)
            dx = x - tl.load(geometry + i * 5)
            dy = y - tl.load(geometry + i * 5 + 1)
            u = ((dx * c + dy * s) * flip + 0.5) * CELL - 0.5
            v = (dy * c - dx * s + 0.5) * CELL - 0.5
            on = live & (u > -1) & (u < CELL) & (v > -1) & (v < CELL)
            fu = u - tl.floor(u)
            fv = v - tl.floor(v)
            ui = tl.floor(u).to(tl.int32)
            vi = tl.floor(v).to(tl.int32)
            pr = tl.zeros([BLOCK], tl.float32)
            pg = pr
            pb = pr
            pa = pr
            for t in tl.static_range(4):
                q = _tap(atlas, offset, ui + t % 2, vi + t // 2, on, CELL, CELL)
                wu = fu if t % 2 == 1 else 1 - fu
                wv = fv if t // 2 == 1 else 1 - fv
                w = wu * wv * (1.0 / 255)
                pr += (q & 255).to(tl.float32) * w
                pg += ((q >> 8) & 255).to(tl.float32) * w
                pb += ((q >> 16) & 255).to(tl.float32) * w
                pa += ((q >> 24) & 255).to(tl.float32) * w
            m = colour + i * 12
            nr = tl.load(m) * pr + tl.load(m + 1) * pg + tl.load(m + 2) * pb + tl.load(m + 3) * pa
            ng = tl.load(m + 4) * pr + tl.load(m + 5) * pg + tl.load(m + 6) * pb
            ng += tl.load(m + 7) * pa
            nb = tl.load(m + 8) * pr + tl.load(m + 9) * pg + tl.load(m + 10) * pb
            nb += tl.load(m + 11) * pa
            r = r * (1 - pa) + tl.minimum(tl.maximum(nr, 0.0), pa)
            g = g * (1 - pa) + tl.minimum(tl.maximum(ng, 0.0), pa)
            b = b * (1 - pa) + tl.minimum(tl.maximum(nb, 0.0), pa)
            top = tl.where(pa > 0.5, k, top)
    width = tl.load(strip_geometry + n * 6 + 2)
    height = tl.load(strip_geometry + n * 6 + 3)
    if width > 0:
        angle = tl.load(strip_geometry + n * 6 + 4)
        c = tl.cos(angle)
        s = tl.sin(angle)
        dx = x - tl.load(strip_geometry + n * 6)
        dy = y - tl.load(strip_geometry + n * 6 + 1)
        u = ((dx * c + dy * s) / width + 0.5) * STRIP_W - 0.5
        v = ((dy * c - dx * s) / height + 0.5) * STRIP_H - 0.5
        on = live & (u > -0.5) & (u < STRIP_W - 0.5) & (v > -0.5) & (v < STRIP_H - 0.5)
        fu = u - tl.floor(u)
        fv = v - tl.floor(v)
        ui = tl.floor(u).to(tl.int32)
        vi = tl.floor(v).to(tl.int32)
        pa = tl.zeros([BLOCK], tl.float32)
        for t in tl.static_range(4):
            first = n * (STRIP_W * STRIP_H)
            q = _tap(strips, first, ui + t % 2, vi + t // 2, on, STRIP_W, STRIP_H)
            wu = fu if t % 2 == 1 else 1 - fu
            wv = fv if t // 2 == 1 else 1 - fv
            pa += q.to(tl.float32) * wu * wv * (1.0 / 255)
        m = strip_colour + n * 6
        card = on & (tl.load(m + 3) + 0 * x >= 0)
        r = tl.where(card, tl.load(m + 3), r) * (1 - pa) + tl.load(m) * pa
        g = tl.where(card, tl.load(m + 4), g) * (1 - pa) + tl.load(m + 1) * pa
        b = tl.where(card, tl.load(m + 5), b) * (1 - pa) + tl.load(m + 2) * pa
        top = tl.where(on, K, top)
    tl.store(out + base + o_p, r, live)
    tl.store(out + base + P + o_p, g, live)
    tl.store(out + base + 2 * P + o_p, b, live)
    tl.store(slot + n.to(tl.int64) * P + o_p, top.to(tl.uint8), live)
