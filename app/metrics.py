"""What a running server counts and measures, in Prometheus' terms.

Every server has a registry of its own; nothing is kept in the module.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client import Metric

    from k3vl.lm.stats import EngineStats
    from k3vl.types import Usage

LAG_INTERVAL = 0.05
_LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class _EngineNumbers(Collector):
    """Asks the engine when somebody looks."""

    def __init__(self, read: Callable[[], EngineStats | None]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """What the engine holds now, and what it has counted."""
        stats = self._read()
        held = GaugeMetricFamily("k3vl_cache_bytes", "Bytes held, by kind.", labels=["kind"])
        for kind, value in (stats.bytes_by_kind if stats else {}).items():
            held.add_metric([kind], value)
        yield held
        yield GaugeMetricFamily(
            "k3vl_encoder_cache_pins",
            "Holds on media features that must stay.",
            value=stats.feature_pins if stats else 0,
        )
        if stats is None:
            return
        yield GaugeMetricFamily(
            "k3vl_engine_running_mean",
            "Requests that run at once, mean over all steps.",
            value=stats.mean_running,
        )
        found = {"hit": stats.hit_tokens, "miss": stats.prompt_tokens - stats.hit_tokens}
        made = {"hit": stats.feature_hits, "miss": stats.feature_misses}
        queue = {"queue": stats.queue_seconds, "first_token": stats.first_token_seconds}
        yield _counted("k3vl_prefix_lookups", "Requests by what was known of them.", stats.lookups)
        yield _counted("k3vl_prefix_tokens", "Prompt tokens found and not found.", found)
        yield _counted("k3vl_encoder_lookups", "Media features found and not found.", made)
        yield _counted("k3vl_cache_evictions", "What went to make room, by kind.", stats.evictions)
        yield _counted("k3vl_stage_seconds", "Time by stage of a step.", stats.stage_seconds)
        yield _counted("k3vl_wait_seconds", "From arrival to admission and first token.", queue)
        for name, text, value in (
            ("preemptions", "Requests that gave way.", stats.preemptions),
            ("lost_tokens", "Tokens asked for again after eviction.", stats.lost_tokens),
            ("held_back", "Steps that spared kept prefixes.", stats.held_back),
        ):
            yield CounterMetricFamily(f"k3vl_engine_{name}", text, value=value)


def _counted(name: str, text: str, values: Mapping[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=["kind"])
    for kind, value in values.items():
        family.add_metric([kind], value)
    return family


class Metrics:
    """The metrics of one server."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        """Register everything.

        Args:
            stats: what the engine reports of itself, if it does.
        """
        self.registry = CollectorRegistry()
        self.registry.register(_EngineNumbers(stats))
        self.running = self._gauge("k3vl_requests_running", "Requests that generate.")
        self.waiting = self._gauge(
            "k3vl_requests_waiting", "Requests that are read, prepared or queued."
        )
        self.media_jobs = self._gauge("k3vl_media_jobs", "Media parts under way or waiting.")
        self.lag = Histogram(
            "k3vl_event_loop_lag_seconds",
            "How late the event loop woke a sleeper.",
            buckets=_LAG_BUCKETS,
            registry=self.registry,
        )
        self.responses = Counter(
            "k3vl_http_responses",
            "Answers by path and status.",
            ["path", "status"],
            registry=self.registry,
        )
        self.tokens = Counter(
            "k3vl_tokens", "Tokens of finished answers by kind.", ["kind"], registry=self.registry
        )
        self.first_token = Histogram(
            "k3vl_time_to_first_token_seconds",
            "From a prepared request to its first text.",
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.preparation = Histogram(
            "k3vl_preparation_seconds",
            "Fetching, decoding, cutting and tokenising.",
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.cancelled = Counter(
            "k3vl_requests_cancelled", "Clients that left early.", registry=self.registry
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

    def count(self, usage: Usage, *, is_first: bool) -> None:
        """Count a finished answer; the prompt counts with the first of a request's."""
        prompt = {
            "prompt": usage.prompt_tokens,
            "image": usage.image_tokens,
            "video": usage.video_tokens,
            "cached": usage.cached_tokens,
        }
        answer = {"completion": usage.completion_tokens, "reasoning": usage.reasoning_tokens}
        for kind, value in ((prompt if is_first else {}) | answer).items():
            self.tokens.labels(kind).inc(value)

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)

    async def watch_loop(self) -> None:
        """Measure the event loop's lag for ever."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_INTERVAL
            await asyncio.sleep(LAG_INTERVAL)
            self.lag.observe(max(loop.time() - due, 0.0))
