"""Machine code in Triton's kernels is of one element, whichever thread has it in which register.

In Gluon a kernel says itself how a tensor lies in registers; in Triton the compiler does, and Triton
3.9 laid the joined products' weights out otherwise than 3.6, whose order their machine code relied
on: wrong answers, and no error.
"""

from __future__ import annotations

import ast
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def test_machine_code_in_triton_is_of_one_element() -> None:
    found = 0
    for path in sorted(KERNELS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.inline_asm_elementwise":
                (pack,) = (x.value for x in node.keywords if x.arg == "pack")
                assert ast.unparse(pack) == "1", f"{path.name}:{node.lineno}"
                found += 1
    assert found >= 2
