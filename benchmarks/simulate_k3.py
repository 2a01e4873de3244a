"""K3 at its real size, without weights: the scheduler and arena of the engine under a cost model.

    python benchmarks/simulate_k3.py [--output benchmarks/simulate_k3.json]
        [--plot docs/simulate-k3.png]

The plot wants matplotlib, which k3vl does not.

The traces run through the same scheduler code over three memories of equal size:

- ``one arena``: what the engine does, pages of 64 tokens;
- ``static split``: 0.9 bytes of state for every byte of pages, five slots a running request, as
  SGLang divides by default; checkpoints live in the state part, pages and features in the other;
- ``1536-token blocks``: one memory, prefixes and states at multiples of 1536 tokens only, as vLLM.

Order and choice of evictions are the same for all; the last two admit in order of arrival whoever
fits, as those engines do.

The clock is simulated. Cost model: decode by batch size and prefill by token as published hardware
allows (roofline of one H200 divided by the number of GPUs), 2.2 microseconds a patch.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from k3vl.lm.admission import Admission
from k3vl.lm.arena import Arena, Entry
from k3vl.lm.cache import CacheSizes
from k3vl.lm.features import MediaItem
from k3vl.lm.scheduler import Scheduler
from k3vl.lm.sequence import Sequence, checkpoint_depths

BUDGET = 64 * 2**30
GPUS = 16
HEADS, KDA_LAYERS, MLA_LAYERS = 96, 69, 24
CELL = 67_968  # a head's 128 x 128 float32 state and its window, in whole latent rows
LATENT_ROW, FEATURE_ROW = 1_152, 14_336
DECODE_MS = ((1, 32.1), (8, 73.1), (64, 273.0), (512, 380.0))
PREFILL_MS = 0.27
PATCH_MS = 0.0022

AGENTS = (20, 40, 60, 80)
"""Sessions; the memory holds the prefixes of some 40."""

Piece = tuple[str, int]


@dataclass(frozen=True)
class Turn:
    """A request: its prompt as named pieces, its pictures, its answer's length, when it comes."""

    pieces: tuple[Piece, ...]
    pictures: tuple[tuple[int, int, str], ...]
    answer: int
    after: float
    session: int


def sizes(page_size: int, budget: int = BUDGET) -> CacheSizes:
    """K3's units for a page size, as ``plan_cache`` would make them."""
    per_unit = math.ceil(MLA_LAYERS * page_size * LATENT_ROW / CELL)
    return CacheSizes(
        num_units=budget // (per_unit * CELL),
        unit_bytes=per_unit * CELL,
        page_size=page_size,
        units_per_slot=math.ceil(KDA_LAYERS * HEADS / per_unit),
        cells_per_unit=per_unit,
        feature_rows=per_unit * CELL // FEATURE_ROW,
    )


class SplitArena(Arena):
    """Two arenas behind one face: states in one, everything else in the other."""

    def __init__(self, size: int, state_units: int) -> None:
        super().__init__(size - state_units)
        self.states = Arena(state_units)

    @property
    def floor(self) -> float:
        return self.states.floor

    def of(self, kind: str) -> Arena | None:
        return self.states if kind in ("slot", "checkpoint") else None

    def take(self, units, kind):
        part = self.of(kind)
        return super().take(units, kind) if part is None else part.take(units, kind)

    def try_take(self, units, kind, rank):
        part = self.of(kind)
        if part is None:
            return super().try_take(units, kind, rank)
        return part.try_take(units, kind, rank)

    def give_back(self, units, kind):
        part = self.of(kind)
        return super().give_back(units, kind) if part is None else part.give_back(units, kind)

    def relabel(self, units, old, new):
        self.states.relabel(units, old, new)

    def _cheapest(self):
        while True:
            try:
                return super()._cheapest()
            except IndexError:  # pages stay while a state needs them: let the other part give way
                self.states._evict(self.states._cheapest())


def _routed(name: str):
    def method(self, entry: Entry, **options):
        part = self.of(entry.kind)
        return getattr(part or super(SplitArena, self), name)(entry, **options)

    return method


for _name in ("keep", "touch", "hold", "release", "lead", "deem", "drop"):
    setattr(SplitArena, _name, _routed(_name))


class InOrder(Admission):
    """First come, first served, whatever goes for it."""

    def in_turn(self, waiting):
        return list(waiting)

    def holds_back(self, sequence, hit, running):
        return False


class InOrderScheduler(Scheduler):
    """The same rules, but for admission."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.admission = InOrder(sizes=self.sizes, arena=self.arena, tree=self.tree)


class SplitScheduler(InOrderScheduler):
    """The same over a static split."""

    def __post_init__(self) -> None:
        super().__post_init__()
        state = int(self.sizes.num_units * 0.9 / 1.9)
        self.arena = SplitArena(self.sizes.num_units, state)
        self.tree.arena = self.features.arena = self.arena
        self.max_requests = state // self.sizes.units_per_slot // 5

    def _fits(self, state: int, rest: int) -> bool:
        return self.arena.states.fits(state) and self.arena.fits(rest)


MEMORIES = {
    "one arena": lambda: Scheduler(sizes=sizes(64), max_step_tokens=8192, prefill_chunk=8192),
    "static split": lambda: SplitScheduler(
        sizes=sizes(64), max_step_tokens=8192, prefill_chunk=8192
    ),
    "1536-token blocks": lambda: InOrderScheduler(
        sizes=sizes(1536), max_step_tokens=8192, prefill_chunk=8192
    ),
}

# ------------------------------------------------------------------ traces


def agents(rng: random.Random, count: int, first: int) -> list[list[Turn]]:
    """A shared head of 8,000 tokens, files of each session's own, ten small steps."""
    sessions = []
    for s in range(first, first + count):
        pieces: list[Piece] = [("agent head", 8000), (f"files {s}", rng.randint(10_000, 40_000))]
        turns = []
        for t in range(10):
            pieces.append((f"result {s}.{t}", rng.randint(500, 4000)))
            answer = rng.randint(100, 500)
            turns.append(Turn(tuple(pieces), (), answer, rng.uniform(0.5, 4), s))
            pieces.append((f"answer {s}.{t}", answer))
        sessions.append(turns)
    return sessions


def chats(rng: random.Random, count: int, first: int) -> list[list[Turn]]:
    """One to four pictures and four questions."""
    sessions = []
    for s in range(first, first + count):
        pieces: list[Piece] = [("chat head", 500)]
        pictures: list[tuple[int, int, str]] = []
        turns = []
        for t in range(4):
            for p in range(rng.randint(1, 4) if not t else 0):
                size = rng.randint(500, 2000)
                pictures.append((sum(n for _, n in pieces), size, f"{s}.{p}"))
                pieces.append((f"picture {s}.{p}", size))
            pieces.append((f"question {s}.{t}", rng.randint(20, 200)))
            answer = rng.randint(100, 600)
            turns.append(Turn(tuple(pieces), tuple(pictures), answer, rng.uniform(2, 10), s))
            pieces.append((f"answer {s}.{t}", answer))
        sessions.append(turns)
    return sessions


def captions(rng: random.Random, count: int, first: int) -> list[list[Turn]]:
    """A flood of pictures with one instruction in front of all."""
    sessions = []
    for s in range(first, first + count):
        size = rng.randint(500, 3000)
        pieces = (("caption head", 300), (f"picture {s}", size), ("instruction", 60))
        turn = Turn(pieces, ((300, size, f"{s}"),), rng.randint(80, 300), 0.0, s)
        sessions.append([turn])
    return sessions


def traces() -> dict[str, list[list[Turn]]]:
    rng = random.Random(0)
    return {
        "mixed": agents(rng, 15, 3000) + chats(rng, 60, 4000) + captions(rng, 120, 5000),
        "captioning flood": captions(rng, 300, 2000),
        "multi-image chat": chats(rng, 120, 1000),
        "30 agent sessions": agents(rng, 30, 0),
        **{f"{n} agent sessions": agents(random.Random(n), n, 0) for n in AGENTS},
    }


def page_keys(pieces: tuple[Piece, ...], page_size: int) -> tuple[object, ...]:
    """What lies in every whole page: pieces and the part of them."""
    keys, parts = [], []
    room = page_size
    for name, length in pieces:
        at = 0
        while length - at >= room:
            keys.append((*parts, (name, at, room)))
            at, room, parts = at + room, page_size, []
        if length > at:
            parts.append((name, at, length - at))
            room -= length - at
    return tuple(keys)


# ------------------------------------------------------------------ the run


def decode_ms(batch: int) -> float:
    """Step time of one-GPU-equivalent, between the roofline's points."""
    for (b0, t0), (b1, t1) in itertools.pairwise(DECODE_MS):
        if batch <= b1:
            return t0 + (t1 - t0) * (batch - b0) / (b1 - b0)
    return DECODE_MS[-1][1]


def simulate(scheduler: Scheduler, sessions: list[list[Turn]]) -> dict[str, float]:
    """Run all sessions, each turn after the last one's answer and a pause."""
    page = scheduler.sizes.page_size
    clock, number, busy = 0.0, 0, 0.0
    arrivals = [(0.01 * i, i, 0) for i in range(len(sessions))]
    heapq.heapify(arrivals)
    arrived: dict[int, tuple[float, int, int]] = {}
    first: list[float] = []
    generated = recomputed = 0
    seen: dict[int, int] = {}
    while arrivals or scheduler.running or scheduler.waiting:
        if not scheduler.running and not scheduler.waiting:
            clock = max(clock, arrivals[0][0])
        while arrivals and arrivals[0][0] <= clock:
            at, session, turn = heapq.heappop(arrivals)
            scheduler.add(sequence(number, sessions[session][turn], page))
            arrived[number] = at, session, turn
            number += 1
        step = scheduler.plan()
        for new in step.admitted:
            scheduler.restored(new)
            known = seen.get(arrived[new.id][1], 0)
            recomputed += max(0, min(known, new.num_prompt) - new.num_cached)
            seen[arrived[new.id][1]] = new.num_prompt
        decoding = [s for s, _ in step.tokens if s.is_decoding]
        prefill = sum(n for s, n in step.tokens if not s.is_decoding)
        patches = sum(feature.item.patches for feature in step.encode)
        cost = decode_ms(len(decoding)) if decoding else 0.0
        cost += prefill * PREFILL_MS + patches * PATCH_MS
        clock += cost / 1000 / GPUS
        busy += cost / 1000 / GPUS * len(scheduler.running)
        for feature in step.encode:
            feature.ready = True
        for seq, tokens in step.tokens:
            end = seq.num_cached + tokens
            while seq.num_cached < end:
                scheduler.advance(seq, min(page, end - seq.num_cached))
            if seq.num_pending:
                continue
            seq.num_generated += 1
            generated += 1
            at, session, turn = arrived[seq.id]
            if seq.num_generated == 1:
                first.append(clock - at)
            if seq.num_generated == seq.max_new:
                scheduler.finish(seq)
                if turn + 1 < len(sessions[session]):
                    pause = sessions[session][turn + 1].after
                    heapq.heappush(arrivals, (clock + pause, session, turn + 1))
    counts = scheduler.counts
    first.sort()
    return {
        "seconds": clock,
        "output_tokens_per_second": generated / clock,
        "concurrency_mean": busy / clock,
        "concurrency_peak": counts.peak_running,
        "hit_rate": counts.hit_tokens / counts.prompt_tokens,
        "ttft_mean": sum(first) / len(first),
        "ttft_p95": first[int(0.95 * len(first))],
        "ttft_max": first[-1],
        "tokens_recomputed": recomputed,
        "preemptions": counts.preemptions,
    }


def sequence(number: int, turn: Turn, page: int) -> Sequence:
    prompt = sum(length for _, length in turn.pieces)
    hints = [turn.pieces[0][1], *(offset + size for offset, size, _ in turn.pictures[-1:])]
    return Sequence(
        id=number,
        num_prompt=prompt,
        max_new=turn.answer,
        keys=page_keys(turn.pieces, page),
        wanted=checkpoint_depths(prompt, hints, page),
        media=tuple(
            MediaItem(offset=offset, num_tokens=size, patches=4 * size, key=(None, name))
            for offset, size, name in turn.pictures
        ),
    )


def plot(results: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    """One panel a figure, one group of bars a trace."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    panels = (
        ("concurrency_mean", "requests that run, mean", 1),
        ("hit_rate", "prompt tokens found, %", 100),
        ("ttft_mean", "time to first token, mean, s", 1),
        ("output_tokens_per_second", "output tokens a second", 1),
        ("tokens_recomputed", "prompt tokens computed again, M", 1e-6),
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(3 * len(panels), 4), sharey=True)
    names = list(results)
    for axis, (key, title, scale) in zip(axes, panels, strict=True):
        for at, memory in enumerate(MEMORIES):
            across = [i + 0.27 * (at - 1) for i in range(len(names))]
            values = [scale * results[name][memory][key] for name in names]
            axis.barh(across, values, height=0.27, label=memory)
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=8)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    axes[-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).resolve().parent / "simulate_k3.json"
    )
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, sessions in traces().items():
        results[name] = {}
        for memory, make in MEMORIES.items():
            found = simulate(make(), sessions)
            results[name][memory] = {key: round(value, 4) for key, value in found.items()}
            print(f"{name:18} {memory:18}", json.dumps(results[name][memory]), flush=True)
    record = {"budget_bytes": BUDGET, "gpus": GPUS, "results": results}
    options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.plot is not None:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
