"""Results of ``gpu_captions.py``'s rounds: kept by name, compared by medians, said in lines."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_subjects import Failed

if TYPE_CHECKING:
    from benchmarks.gpu_subjects import Subject

GOAL, CPU_GOAL = 5, 50


class Rounds:
    """Results by name: the first of each, and the others; texts apart."""

    def __init__(self) -> None:
        self.first: dict[str, dict[str, Any]] = {}
        self.rounds: dict[str, list[dict[str, Any]]] = {}
        self.texts: dict[str, list[str]] = {}
        self.errors: dict[str, str] = {}

    def known(self, count: int) -> dict[str, Any]:
        """As JSON."""
        found = {"errors": self.errors, "first_round": self.first, "rounds": self.rounds}
        found["same_captions_as_the_cpu"] = self.same_texts(count)
        return found | summary(self.rounds)

    def ask(self, name: str, subject: Subject, *call: Any) -> Any:
        """A result, or None where the record now says why not."""
        try:
            return subject.call(*call)
        except Failed as exc:
            self.errors[name] = str(exc)
            print(f"{name}: {exc}", flush=True)
            return None

    def take(self, name: str, subject: Subject, *call: Any) -> None:
        """Call, unless that has failed before, or making the subject has."""
        if any(name.startswith(failed) for failed in self.errors):
            return
        if (found := self.ask(name, subject, *call)) is None:
            return
        self.texts[name] = found.pop("texts", [])
        print(f"{name}: {found['captions_per_second']:.1f} captions a second", flush=True)
        if name in self.first:
            self.rounds.setdefault(name, []).append(found)
        else:
            self.first[name] = found

    def same_texts(self, count: int) -> dict[str, float]:
        """Share of the first captions that are those of the CPU, by who made them."""
        own = {name: texts for name, texts in self.texts.items() if texts}
        theirs = next((texts for name, texts in own.items() if "CPU" in name), [])
        return {
            name: sum(a == b for a, b in zip(texts[:count], theirs, strict=True)) / count
            for name, texts in own.items()
            if theirs and "CPU" not in name
        }


def summary(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of captions a second, the best of each kind, and ours over the others'."""
    medians = {
        name: statistics.median(found["captions_per_second"] for found in results)
        for name, results in rounds.items()
    }

    def best(*beginnings: str) -> float | None:
        own = [v for name, v in medians.items() if name.startswith(beginnings)]
        return max(own, default=None)

    ours, cpu, peer = best("k3vl, "), best("k3vl on the CPU"), best("transformers")
    return {
        "captions_per_second": medians,
        "best": {"k3vl": ours, "k3vl_on_cpu": cpu, "transformers": peer},
        "over_the_cpu": ours / cpu if ours and cpu else None,
        "over_transformers": ours / peer if ours and peer else None,
    }


def in_short(record: dict[str, Any]) -> list[str]:
    """Lines that say what the record says: of the last round, and the ratios."""
    lines = []
    for name, rounds in record.get("rounds", {}).items():
        last = rounds[-1]
        line = f"{name}: {record['captions_per_second'][name]:.1f} a second"
        if "steps" in last:
            count = last["captions"]
            per = {k: 1e3 * v / count for k, v in last["stage_seconds"].items()}
            stages = ", ".join(f"{k} {v:.2f}" for k, v in per.items() if v >= 0.005)
            line += (
                f", {last['steady_captions_per_second']:.1f} in between; ms a caption: "
                f"{1e3 * last['process_seconds'] / count:.2f} of processor time, {stages}; "
                f"{last['steps']} steps of {last['mean_running']:.0f} requests"
            )
        lines.append(line)
    for name, goal in (("over_transformers", GOAL), ("over_the_cpu", CPU_GOAL)):
        if record.get(name):
            lines.append(f"{name}: {record[name]:.2f} (goal: {goal})")
    return lines
