"""Machine code in Triton's kernels does to each element the same, whichever register has it.

In Gluon a kernel says how a tensor lies in registers; in Triton the compiler does, and Triton
3.9 laid the joined products' weights out otherwise than 3.6, whose order their machine code relied
on: wrong answers, and no error.
"""

from __future__ import annotations

import ast
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
WIDEN = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
"""Two elements in a register, of which each makes a result of its own."""


def test_no_element_depends_on_its_neighbours() -> None:
    """Code of one element at a time cannot; of other code each has to be looked at."""
    found = 0
    for path in sorted(KERNELS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.inline_asm_elementwise":
                (pack,) = (ast.unparse(x.value) for x in node.keywords if x.arg == "pack")
                known = ast.unparse(node.args[0]) == repr(WIDEN)
                assert pack == "1" or known, f"{path.name}:{node.lineno}"
                found += 1
    assert found >= 4
