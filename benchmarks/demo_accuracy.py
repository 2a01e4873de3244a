"""Everything that the demo model's card says, measured: accuracy, 8 bits, confidence.

python benchmarks/demo_accuracy.py --atlas ATLAS --output benchmarks/demo_accuracy.json

One set of questions is written to the disk and asked; a second checkpoint (``--float DIR``, the
weights before they were rounded to 8 bits) is asked some of the same ones. ``--only`` asks some
splits again and leaves the others as the output has them, if it is of the same weights; confidence
and rounding stay too, because they are about all questions. The card is then made by
``python -m k3vl.demo.card``.
"""

import argparse
import json
import shutil
import time
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from k3vl.app.evaluation.ask import LocalAsked
from k3vl.app.evaluation.confidence import Judged, keep, separation, threshold_keeping
from k3vl.app.evaluation.labels import read_labels
from k3vl.app.evaluation.report import provenance
from k3vl.app.evaluation.run import ask_all, rows_of
from k3vl.app.evaluation.scores import score, wilson
from k3vl.checkpoint_writer import save_checkpoint
from k3vl.demo.atlas import load_atlas
from k3vl.demo.floor import NameFloor
from k3vl.demo.heldout import splits, write_split
from k3vl.demo.pack import CHECKPOINT, json_files, read_tensors
from k3vl.pipeline import Pipeline

KEPT = 0.97  # of the right answers to all questions
ITEMS, FEW_NAMES = 150, 80  # questions of a split, and of one about single names
MANY_NAMES = {"name, known drawings", "name, unseen name x style", "name, openmoji"}
MANY = 240
SHARES = ("exact", "balanced", "json", "tool_call")


def ask_part(model, questions, blanks):
    """In a process of its own; the engine takes one thread for a model of this size."""
    with Pipeline.load(model) as pipeline:
        return list(ask_all(questions, LocalAsked(pipeline), blanks=blanks, in_flight=16))


def asked(model, questions, blanks, processes):
    """Splits are dealt out to processes; results come grouped by split, in order."""
    start = time.perf_counter()
    names = list(dict.fromkeys(question.split for question in questions))
    parts = [[q for q in questions if q.split in names[i::processes]] for i in range(processes)]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        done = pool.map(ask_part, [model] * processes, parts, [blanks] * processes)
        results = [result for part in done for result in part]
    print(f"{model}: {len(results)} questions in {time.perf_counter() - start:.0f} s", flush=True)
    return sorted(results, key=lambda result: names.index(result.question.split))


def plain(trained, folder):
    """A training result as a checkpoint that is not rounded to 8 bits."""
    save_checkpoint(folder, read_tensors(trained), json_files=json_files())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(CHECKPOINT / name, folder / name)
    return str(folder)


def first_of_each(results, count):
    """The first results of each split."""
    seen = Counter()
    kept = []
    for result in results:
        seen[result.question.split] += 1
        if seen[result.question.split] <= count:
            kept.append(result)
    return kept


def is_right(result):
    metric = result.question.metrics[0]
    return bool(score(metric, result.said, result.question.answers).got)


def confidence(results):
    """The threshold that keeps most right answers, and what it does to each split."""
    by_split = defaultdict(list)
    for result in results:
        if result.told is not None and result.told.confidence is not None:
            one = Judged(result.told.confidence, is_right(result))
            by_split[result.question.split].append(one)
    return confidence_of(by_split)


def confidence_of(by_split):
    every = [one for own in by_split.values() for one in own]
    threshold = threshold_keeping(every, KEPT)
    return {
        "threshold": threshold,
        "questions": len(every),
        "chosen": f"keeps {100 * KEPT:.0f} % of the right answers",
        "all": {"separation": separation(every), **asdict(keep(every, threshold))},
        "splits": {
            split: {"separation": separation(own), **asdict(keep(own, threshold))}
            for split, own in by_split.items()
        },
    }


def rounding(eight, full):
    """The same questions, before and after rounding to 8 bits."""
    pairs = [
        (is_right(a), is_right(b))
        for a, b in zip(eight, full, strict=True)
        if a.question.metrics[0] in SHARES
    ]
    n = len(pairs)
    lost, won = sum(b and not a for a, b in pairs), sum(a and not b for a, b in pairs)
    # Paired: only questions that differ say anything; Wilson on their share of all.
    return {
        "questions": n,
        "right_8_bits": sum(a for a, _ in pairs) / n,
        "right_float": sum(b for _, b in pairs) / n,
        "lost": lost,
        "won": won,
        "points_lost": 100 * (lost - won) / n,
        "share_that_differs": [(lost + won) / n, *wilson(lost + won, n)],
        "same_text": sum(a.said == b.said for a, b in zip(eight, full, strict=True)) / len(eight),
    }


def count_of(split, most):
    """Questions of a split, by its name."""
    names = MANY if split in MANY_NAMES else FEW_NAMES if split.startswith("name") else ITEMS
    return min(names, most)


def write_questions(atlas, folder, most, only):
    floor = NameFloor(atlas)
    for split in splits(atlas):
        if split.name.startswith(tuple(only)):
            write_split(split, atlas, floor, folder, count_of(split.name, most))


def report_of(rows, order):
    """Rows in the order of the splits, and what they sum up to."""
    rows = sorted(rows, key=lambda row: order.index(row["split"]))
    heads = list({row["split"]: row for row in reversed(rows)}.values())
    questions = sum(row["value"]["n"] for row in heads)
    finished = sum(row["value"]["n"] * row["finished"] for row in heads) / questions
    return {"questions": questions, "finished": finished, "rows": rows}


def renewed(old, rows, order):
    """A report with some of its splits asked again."""
    asked_again = {row["split"] for row in rows}
    kept = [row for row in old["rows"] if row["split"] not in asked_again]
    return old | report_of([*kept, *rows], order)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--atlas", type=Path, required=True)
    parser.add_argument("--questions", type=Path, help="where the files are, or are to be made")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--float", type=Path, help="training result, before rounding")
    parser.add_argument("--items", type=int, default=MANY, help="at most, of a split")
    parser.add_argument("--blanks", type=int, default=12, help="of them with grey pictures too")
    parser.add_argument("--compared", type=int, default=30, help="of a split, before rounding too")
    parser.add_argument("--only", nargs="+", metavar="SPLIT", help="ask only these, by beginning")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--answers", type=Path, help="JSON Lines with all answers")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    atlas = load_atlas(args.atlas)
    order = [split.name for split in splits(atlas)]
    report = provenance(args.model)
    old = json.loads(args.output.read_text()) if args.only else {}
    if args.only and old["weights_sha256"] != report["weights_sha256"]:
        parser.error(f"{args.output} is of other weights")
    with ExitStack() as stack:
        folder = args.questions or Path(stack.enter_context(TemporaryDirectory()))
        if not (folder / "labels.jsonl").exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_questions(atlas, folder, args.items, args.only or [""])
        eight = asked(args.model, read_labels(folder), args.blanks, args.processes)
        if args.answers:
            lines = [json.dumps(result.record()) + "\n" for result in eight]
            args.answers.write_text("".join(lines))
        rows = [row.record() for row in rows_of(eight)]
        if args.only:
            report |= renewed(old, rows, order)
        else:
            report |= report_of(rows, order) | {"confidence": confidence(eight)}
        args.output.write_text(json.dumps(report, indent=1) + "\n")
        if args.float:
            again = first_of_each(eight, args.compared)
            unrounded = plain(args.float, Path(stack.enter_context(TemporaryDirectory())) / "float")
            full = asked(unrounded, [r.question for r in again], 0, args.processes)
            report["rounding to 8 bits"] = rounding(again, full)
            args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
