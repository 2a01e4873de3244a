"""Tables and figures out of lines of results."""

from __future__ import annotations

import sys
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import plot_results
from benchmarks.bars import Bar, draw
from benchmarks.measured import MissingLineError, Row, find
from benchmarks.plot_results import compared, differences, span_of, time_of, with_blocks

ROW = Row(label="op B1", op="op", shape="B1 ", against="Marlin", goal=1.5, share=0.5)


def line(implementation: str, us: float, commit: str = "bbb", **more: Any) -> dict[str, Any]:
    return {
        "op": "op", "shape": "B1 L2", "implementation": implementation, "median_us": us,
        "of_limit": 6 / us, "commit": commit, **more,
    }  # fmt: skip


def test_the_newest_line_of_everybody_counts() -> None:
    lines = [
        line("k3vl", 12.0, "aaa"),
        line("SGLang 1.0 fused_marlin_moe", 30.0, "aaa"),
        line("k3vl", 10.0),
        line("k3vl, other", 1.0),
        line("SGLang 1.0 fused_marlin_moe", 3.0, shape="B10 L2"),
        line("PyTorch reference", 1.0),
        line("PyTorch something", 5.0, agrees=False),
    ]
    found = find(lines, ROW)
    assert found.line["median_us"] == 10.0
    assert [(p.name, p.us) for p in found.peers] == [("Marlin", 30.0), ("PyTorch", 5.0)]
    assert found.ratio == 3.0
    assert found.verdict == "1.5x, 50 %: reached"
    row = compared([found], time_of, ", us").splitlines()[-1]
    assert row == (
        "| op B1 | 10.0 | 60.0 % | Marlin 30.0 (of aaa); PyTorch 5.0 | 3.00x; other result "
        "| 1.5x, 50 %: reached | bbb |"
    )


@pytest.mark.parametrize(
    ("ours", "marlin", "verdict"),
    [
        (10.0, 14.9, "**missed**"),
        (10.0, 15.0, "reached"),
        (13.0, 30.0, "**missed**"),  # 46 % of the limit
        (10.0, None, "open"),
        (13.0, None, "**missed**"),
    ],
)
def test_a_goal_is_judged_by_the_lines(ours: float, marlin: float | None, verdict: str) -> None:
    lines = [line("k3vl", ours)]
    if marlin:
        lines.append(line("SGLang 1.0 fused_marlin_moe", marlin))
    assert find(lines, ROW).verdict == f"1.5x, 50 %: {verdict}"


def test_a_variant_stands_for_the_default_at_its_own_commit_only() -> None:
    row = Row(label="op", op="op", shape="B1 ", instead={"aaa": "k3vl, wide"})
    lines = [line("k3vl, wide", 8.0, "aaa"), line("k3vl", 12.0, "aaa")]
    assert find(lines, row).line["median_us"] == 8.0
    assert "| aaa, as a variant |" in compared([find(lines, row)], time_of, "")
    assert find([*lines, line("k3vl", 7.0)], row).line["median_us"] == 7.0


def test_a_case_that_nobody_recorded_is_an_error() -> None:
    with pytest.raises(MissingLineError, match="op, B1"):
        find([line("k3vl", 1.0, shape="B10 L2")], ROW)


def test_published_figures_are_a_peer() -> None:
    found = find([line("k3vl", 10.0, published_us=20.0)], Row(label="x", op="op", shape="B1"))
    assert (found.ratio, found.peers[0].of_limit) == (2.0, pytest.approx(0.3))
    row = Row(label="x", op="op", shape="B1", goal=1.2, apart="not comparable")
    apart = find([line("k3vl", 10.0, published_us=20.0)], row)
    assert (apart.ratio, apart.verdict) == (None, "1.2x: open")


@pytest.mark.parametrize(
    ("us", "said"),
    [(131.65, "131.7 us"), (4386.8, "4.39 ms"), (25251.0, "25.3 ms"), (1.124e6, "1,124 ms")],
)
def test_spans(us: float, said: str) -> None:
    assert span_of(us) == said


def test_a_changed_cell_is_named() -> None:
    new = "<!-- results: x -->\n| op B1 | 10.0 | 2 |\n<!-- end of results -->"
    old = new.replace("10.0", "10.1")
    told = list(differences("a.md", old, new))
    assert told == ["a.md, x, op B1: '10.1' is in no line; recorded: '10.0'"]
    assert list(differences("a.md", new, new)) == []


def test_a_document_gets_its_blocks_and_a_way_to_the_figure() -> None:
    text = "before\n<!-- results: x -->\nold\n<!-- end of results -->\nbehind\n"
    got = with_blocks("kernels/moe/README.md", text, {"x": ("*Title. More.*\n", "<svg/>")})
    assert "![Title: share of the limit](../../docs/h200-x.svg)" in got
    assert got.startswith("before\n")
    assert got.endswith("behind\n")
    assert "old" not in got
    assert "](h200-x.svg)" in with_blocks("docs/x.md", text, {"x": ("*Title.*\n", "<svg/>")})


def test_checking_changes_nothing(tmp_path, monkeypatch, capsys) -> None:
    for document in plot_results.DOCUMENTS:
        (tmp_path / document).parent.mkdir(parents=True, exist_ok=True)
        text = (plot_results.ROOT / document).read_text()
        (tmp_path / document).write_text(text.replace("1,315", "1,215"))
    (tmp_path / "docs").mkdir(exist_ok=True)
    before = (tmp_path / "kernels/README.md").read_text()
    monkeypatch.setattr(sys, "argv", ["plot_results", "--check"])
    with pytest.raises(SystemExit) as end:
        plot_results.main(tmp_path)
    assert end.value.code == 1
    assert "docs/h200-kernels.svg is not what the lines show" in capsys.readouterr().out
    assert (tmp_path / "kernels/README.md").read_text() == before
    monkeypatch.setattr(sys, "argv", ["plot_results"])
    plot_results.main(tmp_path)
    assert (tmp_path / "docs/h200-kernels.svg").stat().st_size < 150_000


def test_bars_are_as_long_as_their_shares() -> None:
    bars = [Bar("ours", 0.5, "1 us & more", ours=True), Bar("theirs", 1.2, "2 us", ours=False)]
    root = ElementTree.fromstring(draw("a <title>", "share", [("case", bars)], ["caption"]))
    rects = root.findall("{http://www.w3.org/2000/svg}rect")
    full, long = (float(x.get("width", "")) for x in (rects[2], rects[1]))
    assert full == 2 * long
    words = [x.text for x in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a <title>", "share", "case", "ours", "1 us & more", "caption", "100 %"} <= set(words)
