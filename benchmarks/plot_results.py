"""Tables and figures of the documents, from the lines in benchmarks/results.

    python -m benchmarks.plot_results            # write them anew
    python -m benchmarks.plot_results --check    # say what differs from the lines, change nothing

What is written lies in the documents between ``<!-- results: NAME -->`` and
``<!-- end of results -->``; the figures are docs/h200-NAME.svg.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.bars import Bar, draw
from benchmarks.doc_rows import (
    EIGHT_OR_ONE,
    EXPERTS,
    KERNELS,
    SLICE_ROWS,
    Choice,
)
from benchmarks.measured import OURS, RESULTS, SLICES, Found, find, newest, read_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("kernels/README.md", "kernels/moe/README.md", "docs/slices.md")
AXIS = "share of the limit that copy bandwidth and matrix rate, measured in the same run, set"
VISIBLE = 0.05
"""Share of the limit below which a bar shows nothing; the table has the case."""
_BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def time_of(us: float) -> str:
    """Microseconds, to a thousandth or better."""
    return f"{us:,.0f}" if us >= 1000 else f"{us:.1f}"


def span_of(us: float) -> str:
    """The same with its unit, in milliseconds from one on."""
    if us < 1000:
        return f"{us:.1f} us"
    ms = us / 1000
    return f"{ms:,.0f} ms" if ms >= 200 else f"{ms:.1f} ms" if ms >= 20 else f"{ms:.2f} ms"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def compared(found: list[Found], written: Callable[[float], str], unit: str) -> str:
    """Ours, share of the limit, everybody else, ratios in the same order, goal, commit."""
    rows = []
    for case in found:
        us, commit = case.line["median_us"], case.line["commit"]
        beside, ratios = [], []
        for peer in case.peers:
            behind = "" if peer.commit == commit else f" (of {peer.commit})"
            beside.append(f"{peer.name} {written(peer.us)}{behind}")
            other = case.row.apart or "other result"
            ratios.append(times(peer.us / us) if peer.comparable else other)
        variant = case.row.instead.get(commit)
        rows.append(
            [
                *(case.row.label, written(us), percent(case.line["of_limit"])),
                *("; ".join(beside) or "not timed", "; ".join(ratios) or "-"),
                *(case.verdict, f"{commit}, as a variant" if variant else commit),
            ]
        )
    header = ["", f"ours{unit}", "of the limit", f"beside{unit}", "ratio", "goal", "commit"]
    return table(header, rows)


def choices(rows: tuple[Choice, ...], lines: list[dict[str, object]]) -> str:
    """Two ways to do the same, of one run, and which is taken."""
    out = []
    for row in rows:
        one = newest(lines, row.op, row.shape, row.one, row.commit)
        eight = newest(lines, row.op, one["shape"], row.eight, row.commit)
        taken = "eight" if row.eight_taken else "one"
        spans = [span_of(x["median_us"]) for x in (eight, one)]
        out.append([row.label, *spans, taken, row.commit])
    return table(["tokens", "eight products a step", "one", "taken", "commit"], out)


def figure(
    title: str, found: list[Found], written: Callable[[float], str], unit: str = ""
) -> tuple[str, str]:
    """An SVG and its caption."""
    groups = []
    for case in found:
        shown = [p for p in case.peers if p.comparable]
        shares = [case.line["of_limit"], *(p.of_limit for p in shown)]
        if max(shares) < VISIBLE:
            continue
        named = [("ours", case.line["median_us"]), *((p.name, p.us) for p in shown)]
        bars = [
            Bar(name, share, f"{written(us)}{unit}, {percent(share)}", name == "ours")
            for (name, us), share in zip(named, shares, strict=True)
        ]
        groups.append((case.row.label, bars))
    told = origin(found)
    below = [*told, "Behind a bar: median of one call, share of the limit."]
    return draw(title, AXIS, groups, below), f"*{title}. {' '.join(told)}*"


def origin(found: list[Found]) -> list[str]:
    """Device, versions and commits of all lines, in two lines."""
    lines = [case.line for case in found]
    commits = {line["commit"] for line in lines} | {p.commit for x in found for p in x.peers}

    def all_of(name: str) -> str:
        return ", ".join(sorted({str(line[name]) for line in lines}))

    def between(name: str, form: str) -> str:
        values = [format(line[name], form) for line in lines]
        return " to ".join(sorted({min(values), max(values)}))

    return [
        f"{all_of('device')}, torch {all_of('torch')}, Triton {all_of('triton')}; "
        f"commits: {', '.join(sorted(commits))}.",
        f"Limits measured: copy {between('copy_tb_s', '.2f')} TB/s, bfloat16 product "
        f"{between('bf16_tflop_s', '.0f')} TFLOP/s.",
    ]


def written_anew(results: Path = RESULTS) -> dict[str, tuple[str, str]]:
    """By name of a block: its text without the figure's link, and the figure ("" for none)."""
    kernels = read_lines("kernels_h200.jsonl", results)
    slices = read_lines("slices_h200.jsonl", results)
    blocks = {}
    sets = (
        ("kernels", "Kernels beside others", KERNELS, kernels, OURS, time_of, " us"),
        ("experts", "Routed experts beside Marlin", EXPERTS, kernels, OURS, span_of, ""),
        (
            "slices",
            "Five layers of K3 beside SGLang",
            SLICE_ROWS,
            slices,
            SLICES,
            span_of,
            "",
        ),
    )
    for name, title, rows, lines, ours, written, unit in sets:
        found = [find(lines, row, ours) for row in rows]
        svg, caption = figure(title, found, written, unit)
        heading = f",{unit}" if unit else ""
        caption = "\n".join(textwrap.wrap(caption, 105))
        blocks[name] = (f"{caption}\n\n{compared(found, written, heading)}", svg)
    blocks["eight_or_one"] = (choices(EIGHT_OR_ONE, kernels), "")
    return blocks


def with_blocks(document: str, text: str, blocks: dict[str, tuple[str, str]]) -> str:
    """A document's text with its blocks as the lines have them."""
    up = "../" * document.count("/")

    def block(match: re.Match[str]) -> str:
        name = match[2]
        body, svg = blocks[name]
        path = f"h200-{name}.svg" if document.startswith("docs/") else f"{up}docs/h200-{name}.svg"
        title = body.split(".")[0].lstrip("*")
        link = f"![{title}: share of the limit]({path})\n\n" if svg else ""
        return f"{match[1]}\n{link}{body}\n{match[3]}"

    return _BLOCK.sub(block, text)


def differences(document: str, old: str, new: str) -> Iterator[str]:
    """Cells of tables that no line has, and lines that differ otherwise."""
    for (_, name, before), (_, _, after) in zip(blocks_of(old), blocks_of(new), strict=True):
        for was, wanted in zip_longest(before.splitlines(), after.splitlines(), fillvalue=""):
            cells = [[x.strip() for x in line.strip("|").split("|")] for line in (was, wanted)]
            if was.startswith("|") and len(cells[0]) == len(cells[1]):
                for cell, recorded in zip(*cells, strict=True):
                    if cell != recorded:
                        row = f"{document}, {name}, {cells[1][0]}"
                        yield f"{row}: {cell!r} is in no line; recorded: {recorded!r}"
            elif was != wanted:
                yield f"{document}, {name}: {was!r} is not {wanted!r}"


def blocks_of(text: str) -> list[tuple[str, str, str]]:
    """Markers, names and contents."""
    return [(m[0], m[2], m[0].removeprefix(m[1]).removesuffix(m[3])) for m in _BLOCK.finditer(text)]


def main(root: Path = ROOT) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="say what differs, and change nothing")
    options = parser.parse_args()
    blocks = written_anew()
    wrong = []
    for document in DOCUMENTS:
        path = root / document
        old = path.read_text(encoding="utf-8")
        new = with_blocks(document, old, blocks)
        wrong += differences(document, old, new)
        if not options.check:
            path.write_text(new, encoding="utf-8")
    for name, (_, svg) in blocks.items():
        path = root / "docs" / f"h200-{name}.svg"
        if svg and (not path.exists() or path.read_text(encoding="utf-8") != svg):
            wrong.append(f"docs/{path.name} is not what the lines show")
            if not options.check:
                path.write_text(svg, encoding="utf-8")
    if options.check:
        print("\n".join(wrong) or "as recorded")
        sys.exit(bool(wrong))
    print(f"{len(wrong)} places written anew")


if __name__ == "__main__":
    main()
