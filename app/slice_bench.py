"""``k3vl bench slice``: a slice of K3 with random weights, served by the whole engine.

No checkpoint is read: weights are drawn on the device. Scheduler, caches, model and sampler are the
engine's own, so a measured time is what a request would wait. Other kernels are asked first whether
the logits are right; a slice whose logits are wrong is not timed.
"""

from __future__ import annotations

import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import quantiles
from typing import TYPE_CHECKING, Any

import torch

from k3vl.app.slice_cost import Work, pass_work, prefill_work, weight_bytes
from k3vl.config import parse_config
from k3vl.errors import BackendError, Cancelled, CapacityError, ConfigError, K3VLError
from k3vl.kernels.bench.about import append_lines, describe
from k3vl.kernels.bench.timing import Ceilings, measure_ceilings
from k3vl.kernels.choice import choose, reference_kernels
from k3vl.lm.batch import Row, build_batch
from k3vl.lm.cache import HybridCache, plan_cache
from k3vl.lm.engine import Engine, EngineConfig
from k3vl.lm.mirrored import EngineParts, LeadingEngine, lead, require_ranks
from k3vl.lm.moe import LatentMoE
from k3vl.lm.ranks import part_of, split_kernels
from k3vl.load import available_memory, choose_device
from k3vl.synthetic import random_model, slice_config
from k3vl.types import Prompt, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from k3vl.config import TextConfig
    from k3vl.kernels.choice import Kernels
    from k3vl.lm.backend import Token
    from k3vl.lm.model import K3Model
    from k3vl.lm.ranks import Ranks
    from k3vl.load import Device
    from k3vl.types import EncoderItem

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.15}
"""Of the logits' error, row by row the ratio of its norm to the reference's: the larger one of the
median over a prompt and the median over decoding.

Measured where every token goes to the same experts of a layer. Plain PyTorch in bfloat16 is then
0.04 away from itself in float32, and a row that has nothing in common is off by 1.4. With random
weights and a free choice of experts roundings choose other ones: 0.35 to 0.47.
"""
_PROMPT, _DECODED = 40, 8
"""Tokens whose logits are compared."""
PUBLISHED = {
    ("prefill", 1024): 44.0,
    ("prefill", 4096): 136.0,
    ("prefill", 16384): 1124.0,
    ("prefill", 32768): 4541.0,
    ("decode", 1): 2.84,
    ("decode", 32): 4.98,
}
"""Milliseconds of SGLang 0.5.17 on one H200: five layers at K3's dimensions, one run, FlashMLA for
decode, Triton for prefill in chunks of 8192, Marlin for experts, CUDA graphs; context 512."""
_WARM_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceOptions:
    """What is measured.

    Attributes:
        layers, experts, tiny: see :func:`k3vl.synthetic.slice_config`.
        prefill: lengths of prompts.
        decode: requests that decode together.
        context: tokens of each of their prompts.
        pass_tokens: most tokens of a prefill pass, and of a page; a multiple of 16.
        repeat: timed runs of each.
        output: JSON lines are appended here.
        commit: of the code, where there is no repository.
        device: where it runs.
        tensor_parallel: ranks that divide it; see :mod:`k3vl.lm.mirrored`.
        seed: of weights and prompts.
    """

    layers: int = 5
    experts: int | None = None
    tiny: bool = False
    prefill: tuple[int, ...] = (1024, 4096, 16384, 32768)
    decode: tuple[int, ...] = (1, 32)
    context: int = 512
    pass_tokens: int = 8192
    repeat: int = 21
    output: Path | None = None
    commit: str | None = None
    device: Device = "auto"
    tensor_parallel: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One row of the table.

    Attributes:
        what: ``prefill`` of ``size`` tokens, or ``decode`` of ``size`` requests.
        seconds: of every run, or step.
        work: of one, pass by pass.
        limit: seconds that the device's own limits allow.
        published: milliseconds of another engine, where the slice is the same.
    """

    what: str
    size: int
    seconds: tuple[float, ...]
    work: tuple[Work, ...]
    limit: float
    published: float | None

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Of the seconds."""
        low, median, high = quantiles(self.seconds, n=4, method="inclusive")
        return low, median, high


def bench_slice(options: SliceOptions) -> Iterator[Measured]:
    """Check a slice, then measure it; rows come as they are known.

    Raises:
        ConfigError: the options contradict each other, or there is no such device.
        CapacityError: the device has not the memory.
        BackendError: the logits are not the reference's.
    """
    yield from bench_config(config_of(options), options)


def bench_config(config: TextConfig, options: SliceOptions) -> Iterator[Measured]:
    """The same of a configuration that need not be K3's; see :func:`bench_slice`."""
    device, dtype = choose_device(options.device)
    require_ranks(options.tensor_parallel, device)
    kernels = choose(device, dtype)
    engine_config = _engine_config(config, options, dtype)
    _require_room(config, options, kernels, dtype, device, engine_config.cache_bytes)
    want = _reference_logits(config, options, kernels, dtype, device)
    build = partial(_build, config, options, engine_config)
    with closing(_engine(build, options.tensor_parallel, device)) as engine:
        error = _require_right(engine, want, options)
        ceilings = _ceilings(device)
        about = {
            **describe(device, ceilings, commit=options.commit),
            "implementation": f"k3vl, {kernels.name} kernels",
            "error": error,
        }
        count = options.tensor_parallel
        ceilings = Ceilings(bandwidth=count * ceilings.bandwidth, flops=count * ceilings.flops)
        for row in _measure(engine, config, options, ceilings):
            if options.output is not None:
                append_lines(options.output, [{**about, **_line(row, config, options, ceilings)}])
            yield row


def config_of(options: SliceOptions) -> TextConfig:
    """Of the slice that the options describe."""
    if options.layers < 2:
        raise ConfigError(f"{options.layers} layer(s): a slice has two at least")
    longest = max(
        (*options.prefill, options.context + _most_new(max(options.decode, default=1), options))
    )
    content = slice_config(options.layers, experts=options.experts, tiny=options.tiny)
    config = parse_config(content, origin="slice").text
    if longest >= config.max_position_embeddings:
        raise ConfigError(
            f"{longest} tokens: the model's context is {config.max_position_embeddings}"
        )
    return config


def _engine_config(config: TextConfig, options: SliceOptions, dtype: torch.dtype) -> EngineConfig:
    """Room for the largest case and nothing else; nothing is reused."""
    page, batch = options.pass_tokens, max(options.decode, default=1)
    own = part_of(config, options.tensor_parallel)
    sizes = plan_cache(own, dtype, budget_bytes=1 << 50, page_size=page)
    decoding = sizes.pages(options.context + _most_new(batch, options)) + 1
    longest = sizes.pages(max(options.prefill, default=1) + 1)
    units = max(batch * (sizes.units_per_slot + decoding), sizes.units_per_slot + longest)
    return EngineConfig(
        max_requests=batch,
        cache_bytes=(units + 2 * (sizes.units_per_slot + 1)) * sizes.unit_bytes,
        page_size=page,
        max_step_tokens=page + batch,
        prefill_chunk=page,
        reuse=False,
    )


def _require_room(
    config: TextConfig,
    options: SliceOptions,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    cache_bytes: int,
) -> None:
    packed = kernels.latent_moe_mxfp4 is not None
    needed = weight_bytes(config, dtype=dtype, packed=packed) + cache_bytes
    if needed > (free := available_memory(device)):
        raise CapacityError(
            f"{options.layers} layers take {needed / 2**30:.1f} GiB with their caches, "
            f"{free / 2**30:.1f} are free"
        )


class _NoMedia:
    """The encoder of prompts without media."""

    def encode(self, items: Sequence[EncoderItem]) -> list[torch.Tensor]:
        raise AssertionError(f"{len(items)} media items in a slice's prompts")


# ---------------------------------------------------------------------- right or wrong


def _reference_logits(
    config: TextConfig,
    options: SliceOptions,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """By plain PyTorch, of the whole slice; its memory is free again."""
    plain = reference_kernels("what a slice is checked against")
    if kernels.latent_moe_mxfp4 is None:  # the same draw gives other weights in the other form
        plain = replace(plain, latent_moe_mxfp4=None)
    draw = partial(random_model, config, plain, dtype=dtype, device=device, seed=options.seed)
    logits = _logits(draw(), options)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what sums over ranks go through is not torch's memory
    return logits


def _build(
    config: TextConfig, options: SliceOptions, engine: EngineConfig, ranks: Ranks | None
) -> EngineParts:
    """The same weights for the kernels that are measured, or a rank's part of them."""
    device, dtype = choose_device(options.device)
    kernels = choose(device, dtype)
    kernels = kernels if ranks is None else split_kernels(kernels, ranks)
    model = random_model(
        config, kernels, dtype=dtype, device=device, seed=options.seed, ranks=ranks
    )
    return EngineParts(model=model, encoder=_NoMedia(), config=engine)


def _engine(
    build: Callable[[Ranks | None], EngineParts], ranks: int, device: torch.device
) -> Engine:
    if ranks > 1:
        return lead(ranks, build, device.type)
    parts = build(None)
    return Engine(parts.model, parts.encoder, parts.config, stop_ids=parts.stop_ids)


def _require_right(engine: Engine, want: torch.Tensor, options: SliceOptions) -> float:
    """The logits' error."""
    work = partial(_engine_logits, options)
    got = engine.everywhere(work) if isinstance(engine, LeadingEngine) else work(engine)
    rows = (got - want).norm(dim=-1) / want.norm(dim=-1)
    error = max(float(part.median()) for part in rows.split([_PROMPT, _DECODED]))
    limit = LIMITS[engine.model.embedding.dtype]
    if not error < limit:
        raise BackendError(f"logits are off by {error:.1e}, allowed are {limit:g}")
    return error


def _engine_logits(options: SliceOptions, engine: Engine) -> torch.Tensor:
    return _logits(engine.model, options)


@contextmanager
def _same_experts(model: K3Model, seed: int) -> Iterator[K3Model]:
    """Make the choice of experts, of each layer its own, the same for all tokens."""
    generator = torch.Generator().manual_seed(seed)
    biases = [m.router_bias for m in model.modules() if isinstance(m, LatentMoE)]
    before = [bias.clone() for bias in biases]
    for bias in biases:
        order = torch.randperm(len(bias), generator=generator)
        chosen = order[: model.config.num_experts_per_token].to(bias.device)
        bias.index_add_(0, chosen, bias.new_full(chosen.shape, 2.0))  # scores lie in 0..1
    yield model
    for bias, value in zip(biases, before, strict=True):
        bias.copy_(value)


def _logits(model: K3Model, options: SliceOptions) -> torch.Tensor:
    """All logits of a prompt, and of tokens decoded behind it, with the same experts; float64."""
    with _same_experts(model, options.seed):
        return _all_logits(model, options)


def _all_logits(model: K3Model, options: SliceOptions) -> torch.Tensor:
    dtype, device = model.embedding.dtype, model.embedding.device
    sizes = plan_cache(model.config, dtype, budget_bytes=1 << 50, page_size=64)
    sizes = replace(sizes, num_units=sizes.units_per_slot + 1)
    cache = HybridCache(model.config, sizes, dtype=dtype, device=device)
    ids = _prompt(_PROMPT + _DECODED, model.config.vocab_size, options.seed)
    borders = [0, *range(_PROMPT, _PROMPT + _DECODED + 1)]
    rows = []
    for begin, end in pairwise(borders):
        row = Row(
            token_ids=ids[begin:end],
            context_len=begin,
            slot=range(sizes.units_per_slot),
            pages=[sizes.units_per_slot],
        )
        batch = build_batch([row], cache)
        every = torch.arange(end - begin, device=device)
        rows.append(model(replace(batch, logit_rows=every), cache))
    return torch.cat(rows).double()


def _prompt(tokens: int, vocab: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(vocab, (tokens,), generator=generator).tolist())


# ---------------------------------------------------------------------- time


def _measure(
    engine: Engine, config: TextConfig, options: SliceOptions, ceilings: Ceilings
) -> Iterator[Measured]:
    """``config`` of the whole slice, and ceilings of all ranks together."""
    dtype, packed = engine.model.embedding.dtype, engine.model.experts == "mxfp4"
    measured = options.layers, options.experts or 896, options.tiny, options.tensor_parallel
    same = measured == (5, 896, False, 1)
    for tokens in options.prefill:
        work = prefill_work(config, tokens, options.pass_tokens, dtype=dtype, packed=packed)
        yield Measured(
            what="prefill",
            size=tokens,
            seconds=_prefill(engine, tokens, options),
            work=tuple(work),
            limit=sum(w.seconds(ceilings) for w in work),
            published=PUBLISHED.get(("prefill", tokens)) if same else None,
        )
    for batch in options.decode:
        middle = options.context + _WARM_UP + options.repeat // 2
        step = pass_work(config, [(middle, 1)] * batch, dtype=dtype, packed=packed, logits=batch)
        comparable = same and options.context == 512
        yield Measured(
            what="decode",
            size=batch,
            seconds=_decode(engine, batch, options),
            work=(step,),
            limit=step.seconds(ceilings),
            published=PUBLISHED.get(("decode", batch)) if comparable else None,
        )


def _prefill(engine: Engine, tokens: int, options: SliceOptions) -> tuple[float, ...]:
    """From a prompt's arrival to its first token, for one prompt after the other."""
    spans = []
    for run in range(_WARM_UP + options.repeat):
        received: list[Token] = []
        begin = _now(engine)
        _add(engine, run, tokens, options, max_tokens=1, received=received)
        while not received:
            engine.step()
        spans.append(_now(engine) - begin)
    return tuple(spans[_WARM_UP:])


def _decode(engine: Engine, batch: int, options: SliceOptions) -> tuple[float, ...]:
    """Every step's time, with all requests in it: from tokens to tokens, as a client sees them."""
    received: list[Token] = []
    steps = options.repeat + _WARM_UP
    most = _most_new(batch, options)
    for request in range(batch):
        _add(engine, request, options.context, options, max_tokens=most, received=received)
    while any(not job.sequence.num_generated for job in engine.jobs.values()):
        engine.step()
    ends = [_now(engine)]
    for _ in range(steps):
        before = len(received)
        engine.step()  # which waits for its tokens; the device may be at the next step by then
        ends.append(time.perf_counter())
        assert len(received) - before == batch, "every request gets a token in every step"
    for request in range(batch):
        engine.cancel(request)
    return tuple(end - begin for begin, end in pairwise(ends))[_WARM_UP:]


def _most_new(batch: int, options: SliceOptions) -> int:
    """Tokens of the request that decodes first, while the others' prompts go on."""
    passes = -(-options.context // options.pass_tokens)
    return options.repeat + _WARM_UP + batch * passes + 2


def _add(
    engine: Engine,
    request: int,
    tokens: int,
    options: SliceOptions,
    *,
    max_tokens: int,
    received: list[Token],
) -> None:
    def sink(event: Token | K3VLError) -> None:
        if not isinstance(event, K3VLError):
            received.append(event)
        elif not isinstance(event, Cancelled):
            raise event

    ids = _prompt(tokens, engine.model.config.vocab_size, options.seed + 1 + request)
    engine.add(request, Prompt(token_ids=ids), SamplingParams(max_tokens=max_tokens), sink)


def _now(engine: Engine) -> float:
    """Seconds, once the device has done all that it was given."""
    if engine.model.embedding.is_cuda:
        torch.cuda.synchronize(engine.model.embedding.device)
    return time.perf_counter()


def _ceilings(device: torch.device) -> Ceilings:
    """Of a GPU as the kernels' own bench measures them; of a CPU by the same two, smaller."""
    if device.type == "cuda":
        return measure_ceilings()
    source, side = torch.ones(1 << 24), 1024
    target, a = torch.empty_like(source), torch.ones(side, side)
    copy = min(_seconds(lambda: target.copy_(source)) for _ in range(5))
    product = min(_seconds(lambda: a @ a) for _ in range(5))
    return Ceilings(bandwidth=2 * source.nbytes / copy, flops=2 * side**3 / product)


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


# ---------------------------------------------------------------------- results


def _line(
    row: Measured, config: TextConfig, options: SliceOptions, ceilings: Ceilings
) -> dict[str, Any]:
    """In the words of ``benchmarks/results``."""
    low, median, high = row.quartiles
    bytes_, flops = (sum(getattr(w, name) for w in row.work) for name in ("bytes", "flops"))
    kind = "tiny" if options.tiny else "K3"
    size = f"T{row.size}" if row.what == "prefill" else f"B{row.size} L{options.context}"
    if options.tensor_parallel > 1:
        size += f", {options.tensor_parallel} ranks"
    return {
        "op": f"slice_{row.what}",
        "shape": f"{options.layers} layers of {kind}, {config.num_experts} experts, {size}",
        "median_us": round(median * 1e6, 2),
        "quartiles_us": [round(low * 1e6, 2), round(high * 1e6, 2)],
        "count": len(row.seconds),
        "bytes": round(bytes_),
        "flops": round(flops),
        "of_bandwidth": round(bytes_ / median / ceilings.bandwidth, 3),
        "of_flops": round(flops / median / ceilings.flops, 3),
        "of_limit": round(row.limit / median, 3),
        "pass_tokens": options.pass_tokens,
        "published_us": None if row.published is None else row.published * 1e3,
    }


def show(row: Measured, options: SliceOptions) -> str:
    """One row of the table, as text."""
    low, median, high = (value * 1e3 for value in row.quartiles)
    tokens = row.size / median * 1e3
    what = f"{row.what} {row.size}"
    if row.what == "decode":
        what += f" at {options.context}"
    published = ""
    if row.published is not None:
        published = f"   published {row.published:g} ms, {row.published / median:.2f} times ours"
    return (
        f"{what:>20}  {median:10.2f} ms ({low:.2f}..{high:.2f})  {tokens:10,.0f} tokens/s  "
        f"{row.limit * 1e3 / median:6.1%} of the limit{published}"
    )
