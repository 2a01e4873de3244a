"""Everything that the demo model's card says, measured: accuracy, 8 bits, confidence.

python benchmarks/demo_accuracy.py --atlas ATLAS --items 120 --output benchmarks/demo_accuracy.json

One set of questions is written to the disk and asked; a second checkpoint (``--float DIR``, the
weights before they were rounded to 8 bits) is asked some of the same ones. The card is then made
by ``python -m k3vl.demo.card``.
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


def write_questions(atlas_folder, folder, items, names):
    atlas = load_atlas(atlas_folder)
    floor = NameFloor(atlas)
    for split in splits(atlas):
        write_split(split, atlas, floor, folder, names if split.task == "name" else items)


def chosen(questions, items, names):
    """The first questions of each split."""
    counts = Counter()
    for question in questions:
        counts[question.split] += 1
        if counts[question.split] <= (names if question.split.startswith("name") else items):
            yield question


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--atlas", type=Path, required=True)
    parser.add_argument("--questions", type=Path, help="where the files are, or are to be made")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--float", type=Path, help="training result, before rounding")
    parser.add_argument("--items", type=int, default=120, help="questions of a split")
    parser.add_argument("--names", type=int, default=120, help="of splits about single names")
    parser.add_argument("--blanks", type=int, default=40, help="of them with grey pictures too")
    parser.add_argument("--compared", type=int, default=30, help="of a split, before rounding too")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--answers", type=Path, help="JSON Lines with all answers")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = args.questions or Path(stack.enter_context(TemporaryDirectory()))
        if not (folder / "labels.jsonl").exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_questions(args.atlas, folder, args.items, args.names)
        questions = list(chosen(read_labels(folder), args.items, args.names))
        start = time.perf_counter()
        eight = asked(args.model, questions, args.blanks, args.processes)
        report = provenance(args.model) | {
            "questions": len(questions),
            "seconds": round(time.perf_counter() - start),
            "processes": args.processes,
            "rows": [row.record() for row in rows_of(eight)],
            "finished": sum(r.told is not None and r.told.finish != "length" for r in eight)
            / len(eight),
            "confidence": confidence(eight),
        }
        args.output.write_text(json.dumps(report, indent=1) + "\n")
        if args.answers:
            lines = [json.dumps(result.record()) + "\n" for result in eight]
            args.answers.write_text("".join(lines))
        if args.float:
            again = first_of_each(eight, args.compared)
            unrounded = plain(args.float, Path(stack.enter_context(TemporaryDirectory())) / "float")
            full = asked(unrounded, [r.question for r in again], 0, args.processes)
            report["rounding to 8 bits"] = rounding(again, full)
            args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
