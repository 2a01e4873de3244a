"""The Python blocks of the documents run, and print what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^print\(.*\)  # (.*)$", re.MULTILINE)


@pytest.mark.parametrize("page", ["transformers.md", "rollouts.md"])
def test_blocks_print_what_they_say(page, tmp_path, monkeypatch, capsys) -> None:
    source = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = BLOCK.findall(source)
    expected = [line for block in blocks for line in PRINTED.findall(block)]
    assert len(blocks) >= 3
    assert len(expected) == sum(block.count("print(") for block in blocks)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    assert capsys.readouterr().out.splitlines() == expected
