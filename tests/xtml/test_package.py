"""What the package offers, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import k3vl.xtml


def test_public_names_are_there_and_sorted():
    assert k3vl.xtml.__all__ == sorted(k3vl.xtml.__all__)
    assert all(hasattr(k3vl.xtml, name) for name in k3vl.xtml.__all__)


def test_importing_the_format_loads_nothing_heavy():
    code = (
        "import sys, k3vl.xtml\n"
        "heavy = {'torch', 'numpy', 'PIL', 'tiktoken', 'tokenizers', 'av', 'pydantic'}\n"
        "sys.exit(' '.join(sorted(heavy & sys.modules.keys())) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
