"""The embedded engine's loop: plan a step, encode what it needs, run the model, hand out tokens.

One thread owns an engine and everything in it (``local.py`` brings the thread). Continuous
batching: requests enter and leave between steps, decoding and prefill share a step, a long prompt
is prefilled in chunks, and a chunk may end inside a picture.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from k3vl.errors import BackendError, Cancelled, K3VLError, RequestError
from k3vl.lm.backend import Token
from k3vl.lm.batch import Row, build_batch
from k3vl.lm.cache import HybridCache, plan_cache
from k3vl.lm.sampler import Sampler, check_sampling
from k3vl.lm.scheduler import Scheduler, Sequence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from k3vl.lm.backend import Encoder
    from k3vl.lm.model import K3Model
    from k3vl.lm.scheduler import Step
    from k3vl.types import MediaSpan, Prompt, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of an embedded engine.

    Attributes:
        max_requests: requests that run at once; each holds one KDA slot.
        cache_bytes: memory of KDA slots and MLA pages together.
        page_size: tokens of an MLA page.
        max_step_tokens: tokens of one step, over all requests.
        prefill_chunk: prompt tokens of one request in a step.
        num_threads: CPU threads of one operation; None leaves it to torch. Operations on a small
            model are over before a second thread has started, and wait for it on a busy machine.
    """

    max_requests: int = 32
    cache_bytes: int = 512 * 2**20
    page_size: int = 64
    max_step_tokens: int = 2048
    prefill_chunk: int = 1024
    num_threads: int | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A request inside the engine."""

    sequence: Sequence
    prompt: Prompt
    sampler: Sampler
    stop_ids: frozenset[int]
    sink: Callable[[Token | K3VLError], None]
    token_ids: list[int]
    features: dict[int, torch.Tensor] = field(default_factory=dict)  # by span offset


class Engine:
    """Model, cache and scheduler of one device."""

    def __init__(
        self,
        model: K3Model,
        encoder: Encoder,
        config: EngineConfig,
        *,
        stop_ids: tuple[int, ...],
    ) -> None:
        """Allocate the cache.

        Args:
            model: the language model; its dtype and device are the cache's.
            encoder: turns media into features.
            config: limits.
            stop_ids: tokens that end every generation.

        Raises:
            ConfigError: the cache budget is too small.
        """
        dtype, device = model.embedding.dtype, model.embedding.device
        sizes = plan_cache(
            model.config,
            dtype,
            budget_bytes=config.cache_bytes,
            num_slots=config.max_requests,
            page_size=config.page_size,
        )
        self.model, self.encoder, self.config = model, encoder, config
        self.stop_ids = frozenset(stop_ids)
        self.cache = HybridCache(model.config, sizes, dtype=dtype, device=device)
        self.scheduler = Scheduler(
            sizes=sizes,
            max_step_tokens=config.max_step_tokens,
            prefill_chunk=config.prefill_chunk,
        )
        self.jobs: dict[int, Job] = {}

    def admissible(self, prompt: Prompt, sampling: SamplingParams) -> int:
        """Check a request that has not been added yet; safe on any thread.

        Returns:
            The most new tokens it may have.

        Raises:
            RequestError: the parameters make no sense, or the prompt is empty or fills the context.
            CapacityError: it can never fit into the cache.
        """
        check_sampling(sampling)
        length, context = len(prompt.token_ids), self.model.config.max_position_embeddings
        if not length:
            raise RequestError("the prompt has no tokens", param="messages")
        if length >= context:
            raise RequestError(
                f"the prompt has {length} tokens, the model's context is {context}",
                param="messages",
                code="context_length_exceeded",
            )
        max_new = min(sampling.max_tokens, context - length)
        self.scheduler.check_fits(Sequence(id=-1, num_prompt=length, max_new=max_new))
        return max_new

    def add(
        self,
        request_id: int,
        prompt: Prompt,
        sampling: SamplingParams,
        sink: Callable[[Token | K3VLError], None],
    ) -> None:
        """Queue a request that :meth:`admissible` has let through."""
        max_new = self.admissible(prompt, sampling)
        sequence = Sequence(id=request_id, num_prompt=len(prompt.token_ids), max_new=max_new)
        self.scheduler.add(sequence)
        self.jobs[request_id] = Job(
            sequence=sequence,
            prompt=prompt,
            sampler=Sampler(sampling),
            stop_ids=self.stop_ids | set(sampling.stop_ids),
            sink=sink,
            token_ids=list(prompt.token_ids),
        )

    def cancel(self, request_id: int) -> None:
        """Free a request; unknown or ended ones are ignored."""
        if request_id in self.jobs:
            self._fail(self.jobs[request_id], Cancelled("the request was cancelled"))

    def fail_all(self, error: K3VLError) -> None:
        """End every request with the same error."""
        for job in list(self.jobs.values()):
            self._fail(job, error)

    def step(self) -> bool:
        """Run one step; False when there is nothing to do."""
        step = self.scheduler.plan()
        for sequence in step.admitted:
            assert sequence.slot is not None
            self.cache.reset_slot(sequence.slot)
        failed = self._encode(step)
        live = [(s, n) for s, n in step.tokens if s.id not in failed]
        if not live:
            return bool(failed)
        rows = [self._row(self.jobs[s.id], n) for s, n in live]
        batch = build_batch(
            rows,
            page_size=self.scheduler.sizes.page_size,
            conv_width=self.model.config.linear_attn_config.short_conv_kernel_size,
            device=self.model.embedding.device,
        )
        logits = self.model(batch, self.cache)
        done = [self.jobs[s.id] for (s, _), row in zip(live, rows, strict=True) if row.wants_logits]
        for sequence, count in live:
            sequence.num_cached += count
        for job, row in zip(done, logits, strict=True):
            self._emit(job, job.sampler.choose(row))
        return True

    def _encode(self, step: Step) -> set[int]:
        """Make the features that this step's chunks need; returns requests that failed."""
        wanted: list[tuple[Job, MediaSpan]] = []
        for sequence, count in step.tokens:
            job = self.jobs[sequence.id]
            wanted += [
                (job, span)
                for span in _overlapping(job.prompt, sequence.num_cached, count)
                if span.offset not in job.features
            ]
        failed: set[int] = set()
        for job, span, features in self._encode_each(wanted):
            if not isinstance(features, BackendError):
                job.features[span.offset] = features
            elif job.sequence.id not in failed:
                failed.add(job.sequence.id)
                self._fail(job, features)
        return failed

    def _encode_each(
        self, wanted: list[tuple[Job, MediaSpan]]
    ) -> Iterator[tuple[Job, MediaSpan, torch.Tensor | BackendError]]:
        """Features of every span; when the joint call fails, each is tried alone."""
        try:
            encoded = self.encoder.encode([span.item for _, span in wanted]) if wanted else []
        except Exception as exc:  # noqa: BLE001 - one request's media must not end the others
            if len(wanted) == 1:
                error = BackendError(f"the vision tower failed ({type(exc).__name__})")
                error.__cause__ = exc
                yield (*wanted[0], error)
                return
            for pair in wanted:
                yield from self._encode_each([pair])
        else:
            for (job, span), features in zip(wanted, encoded, strict=True):
                yield job, span, features

    def _row(self, job: Job, count: int) -> Row:
        """The part of a step that belongs to one request."""
        sequence = job.sequence
        assert sequence.slot is not None
        begin, end = sequence.num_cached, sequence.num_cached + count
        pieces = []
        for span in _overlapping(job.prompt, begin, count):
            first, last = max(begin, span.offset), min(end, span.offset + span.item.num_tokens)
            features = job.features[span.offset][first - span.offset : last - span.offset]
            pieces.append((first - begin, features))
            if last == span.offset + span.item.num_tokens:
                del job.features[span.offset]  # the cache holds all that follows from them
        return Row(
            token_ids=job.token_ids[begin:end],
            context_len=begin,
            slot=sequence.slot,
            pages=sequence.pages,
            features=pieces,
            wants_logits=count == sequence.num_pending,
        )

    def _emit(self, job: Job, token_id: int) -> None:
        """Deliver a sampled token and end the request where it says so."""
        sequence = job.sequence
        sequence.num_generated += 1
        job.token_ids.append(token_id)
        logprobs = job.sampler.logprobs
        if token_id in job.stop_ids:
            self._end(job)
            job.sink(Token(id=token_id, finish="stop", logprobs=logprobs))
        elif sequence.num_generated == sequence.max_new:
            self._end(job)
            job.sink(Token(id=token_id, finish="length", logprobs=logprobs))
        else:
            job.sink(Token(id=token_id, logprobs=logprobs))

    def _fail(self, job: Job, error: K3VLError) -> None:
        self._end(job)
        job.sink(error)

    def _end(self, job: Job) -> None:
        self.scheduler.finish(job.sequence)
        del self.jobs[job.sequence.id]


def _overlapping(prompt: Prompt, begin: int, count: int) -> list[MediaSpan]:
    """Media spans that share tokens with ``begin .. begin + count``."""
    return [
        span
        for span in prompt.spans
        if span.offset < begin + count and begin < span.offset + span.item.num_tokens
    ]
