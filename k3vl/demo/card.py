"""The model card of the demo checkpoint, made of its measured figures.

``python -m k3vl.demo.card benchmarks/demo_accuracy.json`` writes ``checkpoint/README.md``; a test
holds the two together.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3vl.demo.pack import CHECKPOINT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

CARD = CHECKPOINT / "README.md"
_RATIOS = ("f1", "cer")
_MARKS = {"f1": " (F1)", "cer": " (character errors)", "balanced": " (balanced)"}

_HEAD = """---
license: apache-2.0
library_name: k3vl
pipeline_tag: image-text-to-text
---
# k3vl demo checkpoint

24.6 million parameters with every part of Kimi K3's architecture, in K3's tensor names and chat
format, at 8 bits. It comes with k3vl so that the whole pipeline can be tried and tested on two CPU
cores without a download: pictures, clips, several pictures, thinking, JSON, tool calls.

**What it is.** A model of a closed world: scenes composed of drawings of 837 named things, coloured
shapes, printed words and numbers, bar charts, and short clips in which something moves, appears or
disappears. Every question of that world has one right answer, so it can be measured.

**What it is not.** Not a photo captioner, and not a chat model: it has seen no photograph and no
text but its own questions. It is not Kimi K3, nor made from it: no weight, file or text of that
release went into it. Do not use it for anything but trying and testing software.
"""

_ACCURACY = """
## Accuracy

{questions} questions about scenes that it has never seen, of known drawings where the row names no
other, as files through the whole pipeline; greedy answers, compared as a whole; {finished} ended
by themselves. Beside them: the same questions over a grey picture, and histograms of oriented
gradients with linear discriminants, which are given each drawing cut out and have learned the known
ones. `openmoji` and `emojione-v1` are drawing styles that training never saw; `photos` are cut-out
photographs.

| questions | n | right | 95 % interval | grey picture | HOG+LDA |
|---|---|---|---|---|---|
"""

_SURE = """
## How sure it is

Each answer has a confidence, the geometric mean of the probabilities of its tokens. Below
**{threshold:.2f}** (`min_confidence` in `generation_config.json`) `k3vl caption` writes "I am not
sure." and keeps the guess in its row, and the chat says so under the answer. It is the highest
threshold that {chosen}, and was chosen on {questions:,} of these questions:

| questions | answered | right of those | right answers kept | wrong ones withheld | separation |
|---|---|---|---|---|---|
"""

_SOURCES = """
Separation is the area under the ROC curve: how often a right answer is surer than a wrong one.
A threshold does not make a closed world open: shown what it does not know, the model may still be
sure and wrong.
{rounding}
## What it was made of

Drawings of Noto Emoji (Apache-2.0), FxEmojis (Apache-2.0), Fluent Emoji (MIT), Twemoji (CC-BY-4.0),
Streamline Emojis (CC-BY-4.0), Flat Color Icons (MIT) and Openclipart (public domain), line icons
of further sets, names of Unicode CLDR, and text in free fonts; `NOTICE` lists all with licences.
Drawings of OpenMoji and EmojiOne (CC-BY-SA-4.0) were used for measuring only. The weights are under
the Apache License 2.0.

## Make and measure it again

    pip install 'k3vl[train]'
    python -m k3vl.demo.build_atlas --out ATLAS      # from PyPI, npm and Debian packages
    python -m k3vl.demo.train --atlas ATLAS --out RUN --seconds 1800
    python -m k3vl.demo.pack RUN CHECKPOINT
    k3vl eval --model CHECKPOINT --atlas ATLAS

`docs/demo` in the repository tells how it was trained. `k3vl eval` without more asks the {quick}
questions that come with the package, on pictures of Noto and Fluent drawings.
"""


def render(figures: Mapping[str, Any], quick: int) -> str:
    """The card.

    Args:
        figures: what ``benchmarks/demo_accuracy.py`` wrote.
        quick: number of questions that come with the package.
    """
    sure = figures["confidence"]
    rounding = ""
    if lost := figures.get("rounding to 8 bits"):
        now, before = _percent(lost["right_8_bits"]), _percent(lost["right_float"])
        rounding = (
            f"\nRounding to 8 bits: of {lost['questions']:,} questions {now} are right at 8 bits, "
            f"{before} as trained; {lost['lost']} were lost and {lost['won']} won.\n"
        )
    return "".join(
        (
            _HEAD,
            *_accuracy(figures),
            _SURE.format(**{key: sure[key] for key in ("threshold", "chosen", "questions")}),
            *_sureness(sure),
            _SOURCES.format(rounding=rounding, quick=quick),
        )
    )


def _accuracy(figures: Mapping[str, Any]) -> Iterator[str]:
    yield _ACCURACY.format(
        questions=f"{figures['questions']:,}", finished=f"{100 * figures['finished']:.2f} %"
    )
    for row in figures["rows"]:
        metric, value = row["metric"], row["value"]
        others = [
            _figure(metric, row["baselines"][name]["value"]) if name in row["baselines"] else "-"
            for name in ("blank picture", "HOG+LDA")
        ]
        ends = (_figure(metric, value[end]).removesuffix(" %") for end in ("low", "high"))
        cells = (
            row["split"] + _MARKS.get(metric, ""),
            str(value["n"]),
            _figure(metric, value["value"]),
            "-".join(ends),
            *others,
        )
        yield f"| {' | '.join(cells)} |\n"


def _sureness(sure: Mapping[str, Any]) -> Iterator[str]:
    rows = [("all of them", sure["all"])]
    rows += [
        (split, sure["splits"][split]) for split in sure["splits"] if split.startswith("name,")
    ]
    for name, kept in rows:
        shares = [_percent(kept[key]) for key in ("answered", "right", "right_kept")]
        separation = withheld = "-"
        if kept["separation"] is not None:
            separation, withheld = f"{kept['separation']:.2f}", _percent(kept["wrong_withheld"])
        yield f"| {name} | {' | '.join(shares)} | {withheld} | {separation} |\n"


def _figure(metric: str, value: float) -> str:
    return f"{value:.3f}" if metric in _RATIOS else _percent(value)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    from k3vl.demo.heldout import QUICK

    parser = argparse.ArgumentParser(prog="python -m k3vl.demo.card", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("figures", type=Path, help="what benchmarks/demo_accuracy.py wrote")
    parser.add_argument("--out", type=Path, default=CARD)
    args = parser.parse_args(arguments)
    quick = len((QUICK / "labels.jsonl").read_text("utf-8").splitlines())
    args.out.write_text(render(json.loads(args.figures.read_text("utf-8")), quick), "utf-8")


if __name__ == "__main__":
    main()
