"""The Python blocks of the documents run and print what they say; measured figures are recorded."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks import plot_results
from benchmarks.measured import read_lines

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TIMES = ("ours", "beside", "eight", "one")
"""How columns of measured times begin."""
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


def test_tables_and_figures_are_what_is_recorded(monkeypatch, capsys) -> None:
    """``python -m benchmarks.plot_results`` writes both anew."""
    monkeypatch.setattr(sys, "argv", ["plot_results", "--check"])
    with pytest.raises(SystemExit) as end:
        plot_results.main()
    assert end.value.code == 0, capsys.readouterr().out


@pytest.mark.parametrize("document", plot_results.DOCUMENTS)
def test_every_measured_time_is_a_line_of_results(document: str) -> None:
    """Read from the document alone, whoever wrote it."""
    lines = [x for name in ("kernels", "slices") for x in read_lines(f"{name}_h200.jsonl")]
    recorded = [x["median_us"] for x in lines]
    recorded += [x["published_us"] for x in lines if x.get("published_us")]
    spoken = {f"{us / unit:,.{n}f}" for us in recorded for unit in (1, 1000) for n in (0, 1, 2)}
    text = (ROOT / document).read_text(encoding="utf-8")
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    measured = 0
    for table in tables:
        header, _, *rows = (
            [cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()
        )
        columns = [i for i, name in enumerate(header) if name.startswith(TIMES)]
        assert columns or not re.search(r"\d [um]s\b", table), table
        for row in rows:
            for column in columns:
                for said in re.findall(
                    r"([\d,.]*\d)(?: [um]s)?(?: \(of [^)]*\))?(?:;|$)", row[column]
                ):
                    assert said in spoken, f"{document}, {row[0]}, {header[column]}: {said}"
                    measured += 1
    assert measured >= 6
