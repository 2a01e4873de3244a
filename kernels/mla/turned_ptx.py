"""What :mod:`turned_kernels` says in PTX: products with 96 and 48 columns, which Gluon has not.

Eight warps are two groups of four, each of which issues products of its own. Where operands lie in
the kernel's shared memory is fixed here, in bytes from its begin, where the kernel's only large
allocation lies: two halves of channels by turns, the other half, queries, probabilities, the shared
part. All of it is in rows of 128 bytes in the 128-byte swizzle; a block has 64 columns.

Matrix descriptors, after the PTX ISA ("Matrix Descriptor Format"): address / 16; from bit 32 on the
way between groups of eight rows / 16; bit 62: 128-byte swizzle. An operand that is read along its
rows moves on by 32 bytes for 16 more of its columns, a transposed one by 16 rows.
"""

from __future__ import annotations

HEADS, TILE = 96, 64
LIMIT = 64.0
"""A score may exceed its head's reference by so much, as a power of two, until it is raised."""

BLOCK = TILE * 128
"""Bytes of 64 latents' 64 channels."""
EARLY, LATE, QUERIES = 0, 8 * BLOCK, 12 * BLOCK
PROBABILITIES = QUERIES + 9 * HEADS * 128
SHARED = PROBABILITIES + HEADS * 128
SLABS = (SHARED + BLOCK) // 4096
"""Of 32 rows, in all."""
NOTES = SLABS * 4096
"""Behind it: float32 [96] references, whether one is to be raised; room for 128 numbers; ones."""
ONES = NOTES + 1024
TWO_ONES = 1.0019378662109375
"""Whose bits as float32 are twice those of one in bfloat16."""

_DESCRIPTOR = 1 << 30 | 1024 >> 4
"""The upper half."""

_TURN = 9
"""A named barrier that the compiler does not use."""

_WHO = """
    .reg .b32 thread, group, warp, lane, base, t;
    .reg .pred second;
    mov.u32 thread, %tid.x;
    setp.ge.u32 second, thread, 128;
    vote.sync.any.pred second, second, -1;
    selp.b32 group, 1, 0, second;
    mov.u32 base, global_smem;"""


def _list(first: int, count: int) -> str:
    return ", ".join(f"${i}" for i in range(first, first + count))


def _low(name: str, address: str) -> str:
    """A register with the lower half of the descriptor of an address."""
    return f"""
    .reg .b32 {name};
    shr.u32 {name}, {address}, 4;"""


def _multiply(
    shape: str, sums: str, left: tuple[str, int], right: tuple[str, int], rest: str
) -> str:
    """A product; operands are registers from :func:`_low`, and bytes to go on from there."""
    return f"""
    add.u32 x, {left[0]}, {left[1] >> 4};
    add.u32 y, {right[0]}, {right[1] >> 4};
    mov.b64 c, {{x, {_DESCRIPTOR}}};
    mov.b64 d, {{y, {_DESCRIPTOR}}};
    wgmma.mma_async.sync.aligned.{shape}k16.f32.bf16.bf16 {{{sums}}}, c, d, {rest};"""


def _scores(where: int, first_block: int, blocks: int, *, begin: bool, end: bool) -> str:
    """24 registers [64 latents, 48 heads] += a tile's blocks times the group's queries.

    ``$48``: bytes from ``where`` to the first of the blocks. At the end the second group's come
    behind the first one's, whose softmax runs beside them.
    """
    steps = []
    for block in range(blocks):
        for k in range(4):
            left = "left", block * BLOCK + 32 * k
            right = "right", (first_block + block) * HEADS * 128 + 32 * k
            adds = not begin or block or k
            how = f"{1 if adds else 0}, 1, 1, 0, 0"
            steps.append(_multiply("m64n48", _list(0, 24), left, right, how))
    wait = "wgmma.wait_group.sync.aligned 0;" if end else ""
    second = f"@second bar.sync {_TURN}, 256;" if end else ""
    first = f"@!second bar.arrive {_TURN}, 256;" if end else ""
    return f"""{{{_WHO}
    .reg .b32 x, y;
    .reg .b64 c, d;
    add.u32 x, base, {where};
    add.u32 x, x, $48;
    mad.lo.u32 y, group, {HEADS // 2 * 128}, base;
    add.u32 y, y, {QUERIES};{_low("left", "x")}{_low("right", "y")}
    {second}
    wgmma.fence.sync.aligned;{"".join(steps)}
    wgmma.commit_group.sync.aligned;
    {first}
    {wait}
    }}"""


def _mixing(where: int) -> str:
    """96 registers [128 channels, 96 heads] of each group += values, turned, times probabilities.

    Two blocks, from ``where`` and ``$192`` bytes further on. A group of products.
    """
    text = []
    for m in range(2):
        for k in range(4):
            left, right = ("left", m * BLOCK + k * 16 * 128), ("right", 32 * k)
            text.append(_multiply("m64n96", _list(48 * m, 48), left, right, "1, 1, 1, 1, 0"))
    return f"""{{{_WHO}
    .reg .b32 x, y;
    .reg .b64 c, d;
    mad.lo.u32 x, group, {2 * BLOCK}, base;
    add.u32 x, x, $192;
    add.u32 x, x, {where};{_low("left", "x")}
    add.u32 y, base, {PROBABILITIES};{_low("right", "y")}
    wgmma.fence.sync.aligned;{"".join(text)}
    wgmma.commit_group.sync.aligned;
    }}"""


def _adding() -> str:
    """Four registers [64 heads, 8] += probabilities times ones; the second group begins at 32.

    A group of products of its own.
    """
    text = [
        _multiply("m64n8", _list(0, 4), ("left", 32 * k), ("right", 0), "1, 1, 1, 0, 0")
        for k in range(4)
    ]
    return f"""{{{_WHO}
    .reg .b32 x, y;
    .reg .b64 c, d;
    mad.lo.u32 x, group, 4096, base;
    add.u32 x, x, {PROBABILITIES};{_low("left", "x")}
    add.u32 y, base, {ONES};{_low("right", "y")}
    wgmma.fence.sync.aligned;{"".join(text)}
    wgmma.commit_group.sync.aligned;
    }}"""


_PLACE = """
    shr.u32 warp, thread, 5;
    and.b32 lane, thread, 31;"""


def _exponents(first: int, scale: str) -> str:
    """Registers ``x0``.. = scores from ``first`` on times the scale, less the reference."""
    lines = [
        """
    .reg .f32 x<24>, e<24>, low, high;
    .reg .b32 note;
    and.b32 t, lane, 3;
    shl.b32 t, t, 3;
    shl.b32 note, group, 6;
    add.u32 note, note, t;
    add.u32 note, note, base;"""
    ]
    for n in range(3):
        for j in range(2):
            at = 8 * n + 4 * j
            lines.append(f"""
    ld.shared.v2.f32 {{low, high}}, [note + {NOTES + 128 * n + 32 * j}];
    neg.f32 low, low;
    neg.f32 high, high;""")
            lines += [
                f"\n    fma.rn.f32 x{at + i}, ${first + at + i}, {scale}, {('low', 'high')[i % 2]};"
                for i in range(4)
            ]
    return "".join(lines)


def _referring() -> str:
    """Scores of the first latent become the references: whoever has row 0 stores twelve pairs."""
    lines = []
    for n in range(3):
        for j in range(2):
            at = 8 + 8 * n + 4 * j
            lines.append(f"""
    mul.rn.f32 low, ${at}, $32;
    mul.rn.f32 high, ${at + 1}, $32;
    @first st.shared.v2.f32 [note + {NOTES + 128 * n + 32 * j}], {{low, high}};""")
    return f"""{{{_WHO}{_PLACE}
    .reg .pred first;
    .reg .f32 low, high;
    .reg .b32 note;
    and.b32 warp, thread, 127;
    setp.lt.u32 first, warp, 4;
    shl.b32 t, lane, 3;
    shl.b32 note, group, 6;
    add.u32 note, note, t;
    add.u32 note, note, base;{"".join(lines)}
{_results()}
    }}"""


def _results() -> str:
    """Something for the eight registers that a piece without results has to have."""
    return "\n".join(f"    mov.b32 ${i}, base;" for i in range(8))


def _weighing() -> str:
    """Probabilities, relative to the references, to shared memory: [96 heads, 64 latents].

    And a note if a score exceeds its reference by more than the limit.
    """
    compare = "".join(f"\n    max.f32 highest, highest, x{i};" for i in range(1, 24))
    lines = [f"\n    ex2.approx.ftz.f32 e{i}, x{i};" for i in range(24)]
    for n in range(3):
        for j in range(2):
            for half in range(2):
                at = 8 * n + 4 * j + 2 * half
                # Of the four tiles of 8 x 8: upper and lower latents, then the next heads.
                lines.append(f"\n    cvt.rn.bf16x2.f32 p{2 * j + half}, e{at + 1}, e{at};")
        lines.append(f"""
    stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [place + {4096 * n}], {{p0, p1, p2, p3}};""")
    return f"""{{{_WHO}{_PLACE}
    .reg .f32 highest;
    .reg .pred over;
    .reg .b32 place, row, one, p<4>;
    and.b32 row, lane, 7;
    and.b32 warp, warp, 3;
    shl.b32 warp, warp, 1;
    shr.u32 t, lane, 3;
    and.b32 t, t, 1;
    add.u32 warp, warp, t;
    xor.b32 warp, warp, row;
    shl.b32 warp, warp, 4;
    shr.u32 t, lane, 4;
    shl.b32 t, t, 3;
    add.u32 row, row, t;
    shl.b32 t, group, 4;
    add.u32 row, row, t;
    shl.b32 row, row, 7;
    add.u32 place, base, row;
    add.u32 place, place, warp;
    add.u32 place, place, {PROBABILITIES};{_exponents(8, "$32")}{"".join(lines)}
    mov.f32 highest, x0;{compare}
    setp.gt.f32 over, highest, {LIMIT};
    mov.b32 one, 1;
    @over st.shared.b32 [base + {NOTES + 4 * HEADS}], one;
{_results()}
    }}"""


def _tied(count: int) -> str:
    """As many results as operands, in the same registers."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)])


BEGIN_TYPES = ",".join(["=&f"] * 24 + ["r"] * 8)
BEGIN_SCORES = _scores(EARLY, 0, 4, begin=True, end=False).replace("$48", "$24")
SHARED_SCORES = _scores(SHARED, 8, 1, begin=False, end=False)
END_SCORES = _scores(LATE, 4, 4, begin=False, end=True)
SCORES_TYPES = _tied(24) + ",r" * 8
MIX_LATE, MIX_EARLY = _mixing(LATE), _mixing(EARLY)
MIX_TYPES = _tied(96) + ",r" * 16
ADD = _adding()
ADD_TYPES = _tied(4)
MIX_WAITS = ("wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;")
MIX_WAIT_TYPES = _tied(192)
SCORES_WAIT_TYPES = _tied(24)
WEIGH = _weighing()
REFER = _referring()
SOFTMAX_TYPES = ",".join(["=&r"] * 8 + ["f"] * 32)
VERDICT = f"""{{
    .reg .b32 base;
    mov.u32 base, global_smem;
    ld.shared.b32 $0, [base + {NOTES + 4 * HEADS}];
    }}"""
CHECK_PLACE = f"""{{
    .reg .b32 base;
    .reg .f32 first;
    .reg .pred wrong;
    mov.u32 base, global_smem;
    ld.shared.f32 first, [base + {NOTES}];
    setp.neu.f32 wrong, first, 0f{0xF149F2CA:08X};
    @wrong trap;
    mov.b32 $0, base;
    }}"""
