"""The embedded engine's loop: plan a step, encode what it needs, run the model, hand out tokens.

One thread owns an engine and everything in it (``local.py`` brings the thread). Continuous
batching: requests enter and leave between steps, decoding and prefill share a step, a long prompt
is prefilled in chunks, and a chunk may end inside a picture.

What a token's state and logits are depends on the tokens before it and on nothing else, to the last
bit: not on the batch, the chunks, the caches or a preemption. Kernels whose rows are independent of
each other (the compiled ones for CPUs) have that by themselves, and a chunk of a prompt is then one
pass that it may share with other prompts, cut only where a checkpoint is taken; and what decoding
computed is kept like a prompt's state. With others the rounding of a matrix product depends on
its height; prompts then run page by page, every page in a forward pass of its own with
``page_size`` rows, the last in whole tiles, and requests that decode share one pass (about 1e-4 of
a float32 logit) unless ``exact_decode`` gives each its own. Where nothing is kept for others
(``reuse`` off) and ``exact_decode`` is off too, prompts share passes in the same way.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from k3vl.errors import BackendError, Cancelled, K3VLError, RequestError
from k3vl.lm.cache import TILE, HybridCache, plan_cache
from k3vl.lm.decode import decoder
from k3vl.lm.encoding import EncodeInStep
from k3vl.lm.features import media_items
from k3vl.lm.job import Job, Targets, decode_rows_of, items_to_encode, rows_of
from k3vl.lm.overlap import Flight, launch_ahead, note_ahead
from k3vl.lm.packing import checkpoints_of, states_as
from k3vl.lm.passes import Passes, next_pass
from k3vl.lm.prefix import page_key, page_keys
from k3vl.lm.prompts import prompts
from k3vl.lm.sampler import Forced, Sampler, check_sampling, choose
from k3vl.lm.scheduler import Scheduler
from k3vl.lm.sequence import Sequence, checkpoint_depths
from k3vl.lm.stats import EngineStats, StageTimes
from k3vl.lm.tier import HostTier

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Ordered

    import torch

    from k3vl.lm.backend import Encoder, Token
    from k3vl.lm.batch import Row
    from k3vl.lm.encoding import Encoding
    from k3vl.lm.model import K3Model
    from k3vl.lm.packing import CheckpointDtype
    from k3vl.types import Prompt, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of an embedded engine.

    Attributes:
        max_requests: requests that run at once.
        cache_bytes: memory of all state: KDA slots and checkpoints, MLA pages, media features.
        page_size: tokens of an MLA page, and of a prefill pass unless the kernels' rows are
            independent; a multiple of 16. Prefixes are reused in whole pages.
        host_cache_bytes: host memory for what goes from there, to come back when it is asked for.
        max_step_tokens: tokens of one step, over all requests; at least a page.
        prefill_chunk: prompt tokens of one request in a step; at least a page.
        max_step_patches: patches encoded in one step, or under way at once beside the steps; a
            larger item is encoded alone.
        reuse: keep the state of prompts and media for later requests.
        checkpoint_dtype: how states that are kept for later lie in memory; all but ``exact`` take
            less of it and make answers behind a hit differ in rounding (docs/caching.md).
        exact_decode: make tokens and logits bit-identical in any company where the kernels do not
            by themselves, by decoding one request at a time; costs throughput.
        num_threads: CPU threads of one operation; None leaves it to torch. Operations on a small
            model are over before a second thread has started, and wait for it on a busy machine.
    """

    max_requests: int = 32
    cache_bytes: int = 512 * 2**20
    host_cache_bytes: int = 0
    page_size: int = 64
    max_step_tokens: int = 2048
    prefill_chunk: int = 1024
    max_step_patches: int = 4096
    reuse: bool = True
    checkpoint_dtype: CheckpointDtype = "exact"
    exact_decode: bool = False
    num_threads: int | None = None


class Engine:
    """Model, cache and scheduler of one device."""

    def __init__(
        self,
        model: K3Model,
        encoder: Encoder,
        config: EngineConfig,
        *,
        stop_ids: tuple[int, ...],
        encoding: Callable[[Encoder], Encoding] = EncodeInStep,
    ) -> None:
        """Allocate the cache.

        Args:
            model: the language model; its dtype and device are the cache's.
            encoder: turns media into features.
            config: limits.
            stop_ids: tokens that end every generation.
            encoding: where and when the encoder runs.

        Raises:
            ConfigError: the cache budget is too small, or the page size is no multiple of 16.
        """
        dtype, device = model.embedding.dtype, model.embedding.device
        states = states_as(config.checkpoint_dtype)
        budget, page = config.cache_bytes, config.page_size
        sizes = plan_cache(model.config, dtype, budget_bytes=budget, page_size=page, states=states)
        self.model, self.config = model, config
        self.encoding = encoding(encoder)
        self.stop_ids = frozenset(stop_ids)
        self.cache = HybridCache(model.config, sizes, dtype=dtype, device=device)
        head_dim = model.config.linear_attn_config.head_dim
        self.checkpoints = checkpoints_of(self.cache, states, head_dim)
        host_bytes = config.host_cache_bytes if config.reuse else 0
        self.tier = HostTier(self.cache, host_bytes) if host_bytes else None
        self.decoder = decoder(model, self.cache)
        self.prompts = prompts(model, self.cache)
        self.passes = Passes.of(
            config,
            row_independent=model.kernels.row_independent,
            most_rows=self.prompts.most_rows,
        )
        self.scheduler = Scheduler(
            sizes=sizes,
            max_step_tokens=max(config.max_step_tokens, config.page_size),
            prefill_chunk=max(config.prefill_chunk, config.page_size),
            max_step_patches=config.max_step_patches,
            max_requests=config.max_requests,
            reuse=config.reuse,
            encodes_beside=self.encoding.beside,
            keep_decoded=model.kernels.row_independent,
            tier=self.tier,
        )
        self.jobs: dict[int, Job] = {}
        self._flight: Flight | None = None
        self.times = StageTimes()

    def admissible(self, prompt: Prompt, sampling: SamplingParams) -> int:
        """Check a request that has not been added yet; safe on any thread.

        Returns:
            The most new tokens it may have.

        Raises:
            RequestError: the parameters make no sense, or the prompt is empty or fills the context.
            CapacityError: it can never fit into the cache.
        """
        return self._checked(-1, prompt, sampling).max_new

    def _checked(self, request_id: int, prompt: Prompt, sampling: SamplingParams) -> Sequence:
        check_sampling(sampling)
        length, context = len(prompt.token_ids), self.model.config.max_position_embeddings
        if not length:
            raise RequestError("the prompt has no tokens", param="messages")
        self.check_tokens(prompt.token_ids)
        if length >= context:
            raise RequestError(
                f"the prompt has {length} tokens, the model's context is {context}",
                param="messages",
                code="context_length_exceeded",
            )
        max_new = min(sampling.max_tokens, context - length)
        sequence = self._sequence(request_id, prompt, max_new, sampling.cache_salt)
        self.scheduler.check_fits(sequence)
        return sequence

    def check_tokens(self, token_ids: Ordered[int]) -> None:
        """Refuse what is not in the vocabulary; safe on any thread.

        Raises:
            RequestError: names the first such id.
        """
        vocab = self.model.config.vocab_size
        if not token_ids or 0 <= min(token_ids) <= max(token_ids) < vocab:
            return
        at = next(at for at, token_id in enumerate(token_ids) if not 0 <= token_id < vocab)
        what = f"token {at} is {token_ids[at]}, the vocabulary has {vocab}"
        raise RequestError(what, param="token_ids")

    def job(
        self,
        request_id: int,
        prompt: Prompt,
        sampling: SamplingParams,
        sink: Callable[[Token | K3VLError], None],
    ) -> Job:
        """What :meth:`queue` takes; safe on any thread, and raises as :meth:`admissible` does."""
        return Job(
            sequence=self._checked(request_id, prompt, sampling),
            prompt=prompt,
            sampler=Sampler(sampling),
            stop_ids=self.stop_ids | set(sampling.stop_ids),
            sink=sink,
            token_ids=list(prompt.token_ids),
            salt=sampling.cache_salt,
        )

    def add(
        self,
        request_id: int,
        prompt: Prompt,
        sampling: SamplingParams,
        sink: Callable[[Token | K3VLError], None],
    ) -> None:
        """Make a :meth:`job` and queue it."""
        self.queue(self.job(request_id, prompt, sampling, sink))

    def add_forced(
        self,
        request_id: int,
        prompt: Prompt,
        token_ids: Ordered[int],
        sink: Callable[[Token | K3VLError], None],
    ) -> None:
        """Queue a request whose answer is known: decoding reports how likely its tokens are."""
        self.queue(
            Job(
                sequence=self._sequence(request_id, prompt, len(token_ids), None),
                prompt=prompt,
                sampler=Forced(token_ids),
                stop_ids=frozenset(),
                sink=sink,
                token_ids=list(prompt.token_ids),
            )
        )

    def add_scored(
        self,
        request_id: int,
        prompt: Prompt,
        token_ids: Ordered[int],
        sink: Callable[[Token | K3VLError], None],
    ) -> None:
        """Queue an answer that is to be prefilled behind its prompt, and reported as decoded."""
        first, size = len(prompt.token_ids) - 1, self.config.page_size
        whole = replace(prompt, token_ids=(*prompt.token_ids, *token_ids[:-1]))
        sequence = self._sequence(request_id, whole, 0, None)
        # A page that holds logits we want is computed, whoever may have computed it before.
        sequence.keys = sequence.keys[: first // size]
        sequence.wanted |= {first // size} - {0}
        self.queue(
            Job(
                sequence=sequence,
                prompt=prompt,
                sampler=Forced(()),
                stop_ids=frozenset(),
                sink=sink,
                token_ids=list(whole.token_ids),
                targets=Targets(token_ids=tuple(token_ids), first=first),
            )
        )

    def _sequence(
        self, request_id: int, prompt: Prompt, max_new: int, salt: str | None
    ) -> Sequence:
        length, size = len(prompt.token_ids), self.config.page_size
        keys = page_keys(prompt.token_ids, prompt.spans, size, salt) if self.config.reuse else []
        media = media_items(prompt.spans, salt)
        # The next question about the same media parts from this one behind the last of them.
        hints = (*prompt.hints, media[-1].end) if media else prompt.hints
        return Sequence(
            id=request_id,
            num_prompt=length,
            max_new=max_new,
            keys=tuple(keys),
            wanted=checkpoint_depths(length, hints, size),
            media=media,
        )

    def queue(self, job: Job) -> None:
        """Take part in the steps from now on."""
        self.scheduler.add(job.sequence)
        self.jobs[job.sequence.id] = job

    def update(self, model: K3Model, encoder: Encoder) -> None:
        """Go on with other weights; there must be no requests.

        Everything that the old weights computed is dropped. The new model must have the old one's
        configuration, dtype and device: the cache stays.
        """
        assert not self.jobs
        self._flight = None
        assert model.config == self.model.config
        assert model.embedding.dtype == self.model.embedding.dtype
        assert model.embedding.device == self.model.embedding.device
        self.scheduler.forget()
        self.model = model
        self.encoding.renew(encoder)
        self.decoder.renew(model)
        self.prompts.renew(model)

    def cancel(self, request_id: int) -> None:
        """Free a request; unknown or ended ones are ignored."""
        if request_id in self.jobs:
            self._fail(self.jobs[request_id], Cancelled("the request was cancelled"))

    def fail_all(self, error: K3VLError) -> None:
        """End every request with the same error."""
        for job in list(self.jobs.values()):
            self._fail(job, error)

    def stats(self) -> EngineStats:
        """What the engine holds and has done; safe on any thread."""
        return EngineStats.of(self.scheduler, self.times, self.tier)

    def step(self) -> bool:
        """Run one step, or end one that was launched ahead (``overlap.py``); False: nothing to do.

        One in which nothing can be done but encode waits until something has been.
        """
        busy = bool(self.jobs)
        flight, self._flight = self._flight, None
        if flight is not None and any(map(self._lives, flight.jobs)):
            with self.times.stage("decode"):
                self._land(flight)
            return True
        with self.times.stage("plan"):
            self._take_features(wait=False)
            step = self.scheduler.plan()
        with self.times.stage("restore"):
            self._fill_slots(step.admitted)
        if step.encode:
            with self.times.stage("start"):
                items = items_to_encode(self.jobs.values())
                self.encoding.start([(feature, items[feature]) for feature in step.encode])
        with self.times.stage("wait"):
            self._take_features(wait=bool(self.jobs) and not step.tokens)
        decoding, prefilling = list[Job](), list[tuple[Job, int]]()
        for sequence, count in step.tokens:
            if (job := self.jobs.get(sequence.id)) is None:
                continue
            if sequence.is_decoding:
                decoding.append(job)
            else:
                prefilling.append((job, sequence.num_cached + count))
        with self.times.stage("decode"):
            apart = self.config.exact_decode and not self.model.kernels.row_independent
            each = 1 if apart else max(1, len(decoding))
            for first in range(0, len(decoding), each):
                flight = self._decode(decoding[first : first + each])
                if self.decoder.overlaps and prefilling and not apart:
                    self._flight = flight  # its tokens are awaited when the prompts are under way
                else:
                    self._land(flight)
        with self.times.stage("prefill"):
            self._prefill(prefilling)
        return busy

    def wake(self) -> None:
        """End a step that waits for the encoder, or the next that would; safe on any thread."""
        self.encoding.wake()

    def close(self) -> None:
        """Cancel everything and end what encodes."""
        self.fail_all(Cancelled("the engine was closed"))
        self.encoding.close()

    def _fill_slots(self, sequences: Ordered[Sequence]) -> None:
        """Give sequences that enter their states: of checkpoints, or of empty sequences."""
        empty: list[int] = []
        for sequence in sequences:
            assert sequence.slot is not None
            if not sequence.num_generated:
                self.times.queue += time.perf_counter() - self.jobs[sequence.id].arrived
            if sequence.restore is not None:
                self.checkpoints.load(sequence.restore.units, sequence.slot)
            else:
                assert sequence.num_cached == 0
                empty += sequence.slot
            self.scheduler.restored(sequence)
        if empty:
            self.cache.clear(empty)

    def _take_features(self, *, wait: bool) -> None:
        """Keep what has been encoded; requests whose media could not be end."""
        ready: list[tuple[tuple[int, ...], torch.Tensor]] = []
        for feature, made in self.encoding.take(wait=wait):
            if not feature.entry.kept:
                continue  # all who wanted it have left
            if not isinstance(made, BackendError):
                ready.append((feature.entry.units, made))
                feature.ready = True
                continue
            for job in [j for j in self.jobs.values() if feature in j.sequence.pinned.values()]:
                self._fail(job, made)
        self.cache.write_features(ready)
        self.times.seconds["encode"] = self.encoding.seconds

    def _decode(self, jobs: list[Job]) -> Flight:
        """Launch one token of every request, in one pass."""
        rows = decode_rows_of(jobs)
        last = [job for job, row in zip(jobs, rows, strict=True) if row.wants_logits]
        flight = Flight(last, self.decoder.launch(rows, [job.sampler for job in last]))
        for job in jobs:
            if (job.sequence.num_cached + 1) % self.config.page_size:
                job.sequence.num_cached += 1
            else:
                self._name_page(job)
                self._advance(job.sequence, 1)
        return flight

    def _land(self, flight: Flight) -> None:
        """Hand out a launched step's tokens, while the device computes the next one if it may."""
        if flight.ahead:
            note_ahead(self.scheduler)
        if self.decoder.overlaps:
            live = [(row, job) for row, job in enumerate(flight.jobs) if self._lives(job)]
            self._flight = launch_ahead(live, self.scheduler, self.decoder)
        jobs = self.jobs
        for job, token_id in zip(flight.jobs, flight.launched.tokens(), strict=True):
            if jobs.get(job.sequence.id) is job:  # or it is nobody's: that one has ended
                self._emit(job, token_id)

    def _lives(self, job: Job) -> bool:
        return self.jobs.get(job.sequence.id) is job

    def _name_page(self, job: Job) -> None:
        """Give the page that the coming token completes a key, if it is to be kept."""
        sequence, size = job.sequence, self.config.page_size
        begin, kept = len(sequence.keys) * size, self.config.reuse and self.scheduler.keep_decoded
        if kept and sequence.num_cached + 1 == begin + size:
            key = page_key(job.token_ids, job.prompt.spans, size, job.salt, begin)
            sequence.keys = (*sequence.keys, key)

    def _prefill(self, todo: list[tuple[Job, int]]) -> None:
        """Bring every request to so many tokens."""
        while todo:
            self._prefill_pass(next_pass(todo, self.passes))
            todo = [(job, end) for job, end in todo if job.sequence.num_cached < end]

    def _prefill_pass(self, parts: list[tuple[Job, int]]) -> None:
        """The next tokens of several requests in one pass; a job with targets comes alone."""
        # A prompt's last page is nobody else's: whole tiles do.
        tile = 1 if self.model.kernels.row_independent else TILE
        rows = rows_of(parts, self.cache, tile=tile)
        first = parts[0][0]
        begin, targets = first.sequence.num_cached, first.targets
        scored = targets is not None and begin + parts[0][1] > targets.first
        last = [job for (job, _), row in zip(parts, rows, strict=True) if row.wants_logits]
        logits = self._forward(rows, every_row=scored)
        flight, self._flight = self._flight, None
        if flight is not None:
            self._land(flight)
        for job, count in parts:
            self._advance(job.sequence, count)
        if scored:
            for token in first.scored(begin, logits[: parts[0][1]]):
                self._deliver(first, token)
        elif last:
            chosen = choose(logits, [job.sampler for job in last])
            for job, token_id in zip(last, chosen, strict=True):
                self._emit(job, token_id)

    def _advance(self, sequence: Sequence, count: int) -> None:
        """Note a pass page by page, and take the checkpoint that it ended for."""
        size = self.config.page_size
        done = 0
        while done < count:
            step = min(size - sequence.num_cached % size, count - done)
            checkpoint = self.scheduler.advance(sequence, step)
            done += step
            if checkpoint is not None:
                assert done == count, "a pass ends where a checkpoint is wanted"
                assert sequence.slot is not None
                self.checkpoints.save(sequence.slot, checkpoint)

    def _forward(self, rows: list[Row], *, every_row: bool = False) -> torch.Tensor:
        return self.prompts.run(rows, every_row=every_row)

    def _emit(self, job: Job, token_id: int) -> None:
        """Deliver a chosen token."""
        if not job.sequence.num_generated:
            self.times.first_token += time.perf_counter() - job.arrived
            self.times.first_tokens += 1
        self._deliver(job, job.take(token_id))

    def _deliver(self, job: Job, token: Token) -> None:
        """Hand a token out, behind the end of the request where it says so."""
        if token.finish is not None:
            self._end(job)
        job.sink(token)

    def _fail(self, job: Job, error: K3VLError) -> None:
        self._end(job)
        job.sink(error)

    def _end(self, job: Job) -> None:
        self.scheduler.finish(job.sequence)
        del self.jobs[job.sequence.id]
