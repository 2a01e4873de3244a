"""What an engine reports of itself: a frozen picture of counters, for people and for metrics."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from k3vl.lm.scheduler import Scheduler
    from k3vl.lm.tier import HostTier


STAGES = ("plan", "restore", "start", "encode", "wait", "decode", "prefill")


@dataclass(slots=True)
class StageTimes:
    """Seconds spent so far.

    Attributes:
        seconds: by stage of a step (``plan``; ``restore``; ``start``: give the encoder its work;
            ``wait`` for the encoder, or help it, for want of anything else to do; ``decode``;
            ``prefill``), and ``encode``: what encoding has taken, which may be within ``start`` and
            ``wait``, beside the others, and on two threads.
        queue: between arrival and admission, summed over requests.
        first_token, first_tokens: between arrival and first token, summed over that many requests.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    queue: float = 0.0
    first_token: float = 0.0
    first_tokens: int = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of a block to a stage."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - begin


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine was made, and what it holds now.

    Attributes:
        running, waiting: requests now; ``peak_running`` the most that ran at once;
            ``mean_running`` over all steps (the effective concurrency).
        unit_bytes, units, free_units: the arena; ``bytes_by_kind`` what each kind owns now,
            ``idle_units`` how much of it nobody uses at the moment.
        evictions: entries that went to make room, by kind.
        lookups: requests by outcome in the prefix tree (see ``scheduler.Counts``).
        prompt_tokens, hit_tokens: of those requests.
        feature_hits, feature_misses: look-ups of media features; ``feature_pins`` holds on those
            that a request still has to prefill.
        lost_tokens, held_back: as in ``admission.Admission``.
        checkpoints, checkpoints_skipped, preemptions, recomputed_tokens, steps: as in ``Counts``.
        stage_seconds: time by stage; ``queue_seconds`` before admission and ``first_token_seconds``
            until the first token, both summed over requests; ``first_tokens`` how many.
        host_bytes: held by the host tier; ``host_fetches`` units that came back from it.
        idle_seconds: with no request anywhere in the backend, for want of input.
    """

    running: int
    waiting: int
    peak_running: int
    mean_running: float
    unit_bytes: int
    units: int
    free_units: int
    idle_units: int
    bytes_by_kind: Mapping[str, int]
    evictions: Mapping[str, int]
    lookups: Mapping[str, int]
    prompt_tokens: int
    hit_tokens: int
    feature_hits: int
    feature_misses: int
    feature_pins: int
    checkpoints: int
    checkpoints_skipped: int
    preemptions: int
    recomputed_tokens: int
    steps: int
    lost_tokens: int
    held_back: int
    stage_seconds: Mapping[str, float]
    queue_seconds: float
    first_token_seconds: float
    first_tokens: int
    host_bytes: int = 0
    host_fetches: int = 0
    idle_seconds: float = 0.0

    @classmethod
    def of(cls, scheduler: Scheduler, times: StageTimes, tier: HostTier | None) -> EngineStats:
        """Read the counters; any thread may, they are plain numbers."""
        arena, counts, unit = scheduler.arena, scheduler.counts, scheduler.sizes.unit_bytes
        return cls(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            peak_running=counts.peak_running,
            mean_running=counts.running_steps / max(1, counts.steps),
            unit_bytes=unit,
            units=arena.size,
            free_units=arena.num_free,
            idle_units=arena.num_available - arena.num_free,
            bytes_by_kind={kind: n * unit for kind, n in arena.units_by_kind().items()},
            evictions={str(kind): n for kind, n in dict(arena.evictions).items()},
            lookups=dict(counts.lookups),
            prompt_tokens=counts.prompt_tokens,
            hit_tokens=counts.hit_tokens,
            feature_hits=scheduler.features.hits,
            feature_misses=scheduler.features.misses,
            feature_pins=scheduler.features.pins,
            checkpoints=counts.checkpoints,
            checkpoints_skipped=counts.checkpoints_skipped,
            preemptions=counts.preemptions,
            recomputed_tokens=counts.recomputed_tokens,
            steps=counts.steps,
            lost_tokens=scheduler.admission.lost_tokens,
            held_back=scheduler.admission.held_back,
            stage_seconds=dict(times.seconds),
            queue_seconds=times.queue,
            first_token_seconds=times.first_token,
            first_tokens=times.first_tokens,
            host_bytes=0 if tier is None else tier.held_bytes,
            host_fetches=0 if tier is None else tier.fetched,
        )
