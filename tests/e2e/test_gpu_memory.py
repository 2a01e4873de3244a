"""Streams and memories of a CUDA device: what is made beside or brought back is what it was.

``-m gpu``. Sleeps on the device make one side late: what is ordered by luck alone then fails.
"""

from __future__ import annotations

import random
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from PIL import Image

from k3vl.config import checkpoint_path, load_config, load_media_config
from k3vl.kernels.choice import choose
from k3vl.kernels.recording import EagerRunner, GraphRunner
from k3vl.lm.encoding import EncodeInStep, EncodeOnStream
from k3vl.lm.engine import Engine, EngineConfig
from k3vl.lm.tier import HostTier
from k3vl.load import WeightLoader
from k3vl.pipeline import Pipeline
from k3vl.types import MediaPart, Message, SamplingParams, TextPart
from k3vl.vision.encoder import VisionEncoder, pin_patches
from k3vl.vision.repeats import filled_up
from tests.lm.test_encoding import take_all, take_each, wanted
from tests.lm.test_engine import Inbox
from tests.vision.test_encoder import item as drawn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k3vl.lm.backend import Encoder
    from k3vl.types import EncoderItem, Prompt

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PICTURES = sorted(p for p in EXAMPLES.iterdir() if p.suffix in {".png", ".jpg"})
LATE = 100_000_000
"""Cycles that a stream sleeps: some 60 ms of an H200."""
LONG = 60 * LATE
"""Some 4 s, for what the host does meanwhile on a machine as busy as it may be."""
WAITED = "called a synchronizing CUDA operation"
"""What torch warns of."""
TRAFFIC = SamplingParams(max_tokens=12, logprobs=0)


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    """Questions without, with one and with two pictures, some about the same ones."""
    with Image.open(PICTURES[0]) as opened:
        small = opened.convert("RGB").resize((112, 84))
    contents = [[TextPart("What can you do?")], [TextPart("Name a fruit."), TextPart(" Or two.")]]
    for path in PICTURES:
        contents += [
            [MediaPart("image", path), TextPart("What is this?")],
            [MediaPart("image", path), TextPart("Describe the image.")],
        ]
    for first, second in pairwise(PICTURES):
        both = MediaPart("image", first), MediaPart("image", second), MediaPart("image", small)
        contents.append([*both, TextPart("What is the difference?")])
    with Pipeline.load(device="cpu") as pipeline:
        return [
            pipeline.prepare(pipeline.request([Message(role="user", parts=tuple(parts))])).prompt
            for parts in contents
        ]


@pytest.fixture(scope="module")
def items(prompts: list[Prompt]) -> list[EncoderItem]:
    """Every picture once."""
    return list({span.item.digest: span.item for p in prompts for span in p.spans}.values())


def loader(dtype: torch.dtype, batch: int | None = None) -> WeightLoader:
    """Of the demo checkpoint; without ``batch`` features do not depend on company."""
    directory, device = checkpoint_path("demo"), torch.device("cuda")
    return WeightLoader(
        config=load_config(directory),
        media=load_media_config(directory),
        dtype=dtype,
        device=device,
        kernels=choose(device, dtype),
        batch=batch,
    )


class Late:
    """An encoder whose stream sleeps before every call: its rows come long after."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder

    def encode(self, items: list[EncoderItem]) -> list[torch.Tensor]:
        torch.cuda._sleep(LATE)
        return self.encoder.encode(items)


@dataclass
class Told:
    """What a request was told: tokens and, to the last bit, how likely they are."""

    inbox: Inbox

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Told)
        return self.all == other.all

    @property
    def all(self) -> list[tuple[int, float]]:
        return [(token.id, token.logprobs.logprob) for token in self.inbox.items]


def engine(dtype: torch.dtype, encoding=EncodeInStep, *, late: bool = False, **limits) -> Engine:
    """``exact_decode``: answers do not depend on company, so they can be compared to the bit."""
    directory = checkpoint_path("demo")
    model, encoder = loader(dtype).load(directory)
    settings = {"cache_bytes": 2**28, "max_requests": 5, "exact_decode": True, **limits}
    return Engine(
        model,
        Late(encoder) if late else encoder,
        EngineConfig(**settings),
        stop_ids=(load_config(directory).eos_token_id,),
        encoding=encoding,
    )


def finish(runner: Engine) -> None:
    for _ in range(20_000):
        if not runner.jobs:
            return
        runner.step()
        runner.scheduler.check_integrity()
    raise AssertionError("no progress")


def ask(runner: Engine, prompt: Prompt, sampling: SamplingParams = TRAFFIC) -> Told:
    inbox = Inbox()
    runner.add(0, prompt, sampling, inbox)
    finish(runner)
    return Told(inbox)


def traffic(runner: Engine, prompts: list[Prompt], seed: int, count: int = 24) -> list[Told]:
    """Requests that come while others run; every fifth is cancelled, and left out here."""
    rng, inboxes = random.Random(seed), []
    for number in range(count):
        inboxes.append(Inbox())
        runner.add(number, rng.choice(prompts), TRAFFIC, inboxes[-1])
        for _ in range(rng.randrange(4)):
            runner.step()
            runner.scheduler.check_integrity()
        if number % 5 == 4:
            runner.cancel(number)
    finish(runner)
    return [Told(inbox) for number, inbox in enumerate(inboxes) if number % 5 != 4]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["single", "half"])
def cold(request: pytest.FixtureRequest, prompts: list[Prompt]) -> tuple[torch.dtype, list[Told]]:
    """Every prompt asked of an engine that keeps nothing, on one stream."""
    runner = engine(request.param, reuse=False)
    return request.param, [ask(runner, prompt) for prompt in prompts]


# ------------------------------------------------------------------ the encoder's stream


def test_an_encoder_beside_changes_no_bit(
    cold: tuple[torch.dtype, list[Told]], prompts: list[Prompt]
) -> None:
    dtype, want = cold
    runner = engine(dtype, EncodeOnStream, late=True, reuse=False)
    for prompt, expected in zip(prompts, want, strict=True):
        assert ask(runner, prompt) == expected


@pytest.mark.parametrize("seed", [1, 2])
def test_mixed_traffic_is_answered_as_on_one_stream(
    cold: tuple[torch.dtype, list[Told]], prompts: list[Prompt], seed: int
) -> None:
    """Prefixes, evictions and preemption in a small cache, with late pictures and cancellations."""
    dtype, _ = cold
    small = {"cache_bytes": 6 * 2**20}
    want = traffic(engine(dtype, EncodeInStep, **small), prompts, seed)
    runner = engine(dtype, EncodeOnStream, late=True, **small)
    assert traffic(runner, prompts, seed) == want
    assert sum(runner.scheduler.arena.evictions.values()), "the cache was too small for all"
    runner.close()


def test_rows_are_read_before_their_memory_is_written_again(items: list[EncoderItem]) -> None:
    """The engine's stream reads late; the encoder goes on at once, in memory that was let go."""
    _, encoder = loader(torch.float32).load(checkpoint_path("demo"))
    want = dict(zip([i.digest for i in items], encoder.encode(items), strict=True))
    encoding = EncodeOnStream(encoder)
    for turn in range(12):
        some = [items[(turn + i) % len(items)] for i in range(3)]
        encoding.start([wanted(item) for item in some])
        made = take_all(encoding, len(some))
        torch.cuda._sleep(LATE)
        read = {digest: rows.clone() for digest, rows in made.items()}
        made.clear()
        for _ in range(3):
            encoding.start([wanted(item) for item in reversed(items)])
        encoding._stream.synchronize()
        for digest, rows in read.items():
            assert torch.equal(rows, want[digest])
        while encoding.take(wait=True):
            pass


def test_pixels_are_fetched_before_their_memory_is_written_again(items: list[EncoderItem]) -> None:
    """While the encoder's stream sleeps the host fills page-locked memory for many batches."""
    _, encoder = loader(torch.float32).load(checkpoint_path("demo"))
    want = dict(zip([i.digest for i in items], encoder.encode(items), strict=True))
    encoding = EncodeOnStream(encoder)
    for _ in range(3):
        with torch.cuda.stream(encoding._stream):
            torch.cuda._sleep(LATE)
        for item in (*items, *reversed(items)):
            encoding.start([wanted(item)])
        for digest, rows in take_each(encoding, 2 * len(items)):
            assert torch.equal(rows, want[digest])


def test_new_weights_come_after_what_the_old_ones_still_make(
    prompts: list[Prompt], cold: tuple[torch.dtype, list[Told]]
) -> None:
    """Rows that nobody waits for any more are still being made while the weights change."""
    dtype, want = cold
    runner = engine(dtype, EncodeOnStream, late=True)
    directory = checkpoint_path("demo")
    for number, at in enumerate((2, 6, 9)):
        runner.add(0, prompts[at], TRAFFIC, Inbox())
        runner.step()
        runner.cancel(0)
        model, encoder = loader(dtype).load(directory)
        runner.update(model, Late(encoder))
        assert ask(runner, prompts[number + 3]) == want[number + 3]


# ------------------------------------------------------------------ grids that come again

SMALL, WIDE, CLIP, LARGE = (1, 16, 16), (1, 12, 20), (4, 8, 8), (1, 48, 48)
BATCHES = [
    *([SMALL], [WIDE], [SMALL] * 5, [SMALL, WIDE], [WIDE] * 2, [CLIP]),
    *([SMALL] * 6, [LARGE], [CLIP, SMALL, SMALL, WIDE], [SMALL] * 16),
]
"""Alone, several, filled up, mixed: every one shares memory with the others."""


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["single", "half"])
def pair(request: pytest.FixtureRequest) -> tuple[VisionEncoder, VisionEncoder]:
    """Encoders of the same weights whose batches are alike: done again, and replayed."""
    _, plain = loader(request.param).load(checkpoint_path("demo"))
    eager, graphs = (
        VisionEncoder(
            plain.tower,
            plain.projector,
            max_patches_per_batch=4096,
            join=pin_patches,
            runner=runner,
        )
        for runner in (EagerRunner(), GraphRunner())
    )
    return eager, graphs


def test_replays_are_passes_to_the_bit(pair: tuple[VisionEncoder, VisionEncoder]) -> None:
    """Grids in turn; what was handed out is compared when everything has been replayed."""
    eager, graphs = pair
    want, got, others = [], [], []
    for turn in range(5):
        eager.tower._plans.clear()  # the memory of positions is somebody else's now
        others += [torch.full((n * 2**16,), float("nan"), device="cuda") for n in range(1, 40)]
        for number, grids in enumerate(BATCHES):
            asked = [drawn(*g, seed=1000 * turn + 50 * number + n) for n, g in enumerate(grids)]
            want += eager.encode(asked)
            got += graphs.encode(asked)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert len({rows.data_ptr() for rows in got}) == len(got)
    assert len(graphs.repeats._records) == len({filled_up(sorted(grids)) for grids in BATCHES})


def test_replays_beside_the_engine_are_passes_to_the_bit(
    pair: tuple[VisionEncoder, VisionEncoder],
) -> None:
    """Many replays of the same graphs are under way before the first rows are read."""
    eager, graphs = pair
    torch.cuda.synchronize()
    encoding = EncodeOnStream(graphs)
    for turn in range(4):
        with torch.cuda.stream(encoding._stream):
            torch.cuda._sleep(LATE)
        asked = [
            [drawn(*g, seed=10_000 * turn + 50 * number + n) for n, g in enumerate(grids)]
            for number, grids in enumerate(BATCHES)
        ]
        for batch in asked:
            encoding.start([wanted(one) for one in batch])
        made = take_all(encoding, sum(map(len, asked)))
        torch.cuda._sleep(LATE)
        read = {digest: rows.clone() for digest, rows in made.items()}
        del made
        for batch in reversed(asked):  # over the memory of those rows, and of the graphs
            encoding.start([wanted(one) for one in batch])
        take_all(encoding, sum(map(len, asked)))
        for batch in asked:
            for one, rows in zip(batch, eager.encode(batch), strict=True):
                assert torch.equal(read[one.digest], rows)


def test_a_dropped_record_leaves_the_others_alone(
    pair: tuple[VisionEncoder, VisionEncoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs come and go while others of their pool stay, and are replayed meanwhile."""
    monkeypatch.setattr("k3vl.vision.repeats._MOST_RECORDS", 3)
    eager, graphs = pair
    rng = random.Random(5)
    for turn in range(60):
        grids = BATCHES[rng.choice([0, 1, 1, 2, 3, 4, 5])]
        asked = [drawn(*grid, seed=100_000 + 50 * turn + n) for n, grid in enumerate(grids)]
        for want, rows in zip(eager.encode(asked), graphs.encode(asked), strict=True):
            assert torch.equal(want, rows)
        assert len(graphs.repeats._records) <= 10


# ------------------------------------------------------------------ nobody waits


def asleep(stream: torch.cuda.Stream, cycles: int) -> torch.cuda.Event:
    """The end of a sleep that begins: while it has not come, the host has not waited for it.

    That a stream still works would not show it: its work may have begun when the sleep was over.
    """
    end = torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)
        end.record()
    return end


@contextmanager
def waits() -> Iterator[list[str]]:
    """Operations for which torch made the host wait for the device."""
    seen: list[str] = []
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode(before)
    # Not every mention of synchronizing: torch also warns, once, that this mode is a prototype.
    seen += [f"{w.filename}:{w.lineno}" for w in caught if WAITED in str(w.message)]


def test_the_host_does_not_wait_for_the_encoder(items: list[EncoderItem]) -> None:
    """Nor does it where a grid is new, or where units are cleared and copied.

    CUDA loads a kernel when it is first launched, and may wait for all that runs to do so. Which
    kernels a product takes, the library decides by its height: a grid of as many patches as the
    new one has come before. So have pages: with as many batches under way at once.
    """
    runner = engine(torch.bfloat16, EncodeOnStream)
    encoding, cache = runner.encoding, runner.cache
    for _ in range(3):  # compiles, records
        encoding.start([wanted(item) for item in items])
        take_all(encoding, len(items))
    with torch.cuda.stream(encoding._stream):
        torch.cuda._sleep(LATE)
    encoding.start([wanted(item) for item in items])
    encoding.start([wanted(drawn(1, 14, 10))])
    take_all(encoding, len(items) + 1)
    cache.clear([1, 2])
    cache.copy([1, 2], [3, 4])
    with waits() as waited:
        end = asleep(encoding._stream, LONG)
        encoding.start([wanted(item) for item in items])
        assert not end.query(), "the host has waited for known grids"
        encoding.start([wanted(drawn(1, 10, 14))])
        assert not end.query(), "the host has waited for a new grid"
        take_all(encoding, len(items) + 1)
        assert not end.query(), "the host has waited for rows"
        cache.clear([1, 2])
        cache.copy([1, 2], [3, 4])
        assert not end.query(), "the host has waited for units"
    assert waited == []


def test_the_host_waits_once_a_token(
    prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the token: not for admission, media, checkpoints, prefill or what comes back.

    torch tells of the first token, which a prompt's pass gives; waits for decode steps are counted
    here. A step that was launched in vain is waited for by the next request, or by nobody.
    """
    steps: list[torch.cuda.Event] = []

    class Counted:
        def __init__(self, device: torch.device) -> None:
            self.event = torch.cuda.current_stream(device).record_event()

        def synchronize(self) -> None:
            steps.append(self.event)
            self.event.synchronize()

    monkeypatch.setattr("k3vl.lm.decode.mark", Counted)
    runner = engine(torch.bfloat16, EncodeOnStream, host_cache_bytes=2**26)
    plain = SamplingParams(max_tokens=12)
    with_pictures = [prompt for prompt in prompts if prompt.spans]
    for salt in ("a", "b", "c"):  # compiles, records
        for prompt in prompts:
            ask(runner, prompt, replace(plain, cache_salt=salt))
    for prompt in with_pictures[:4]:
        for salt in ("new", "c"):  # media and all; a prefix
            inbox, before = Inbox(), len(steps)
            with waits() as waited:
                runner.add(0, prompt, replace(plain, cache_salt=salt), inbox)
                finish(runner)
            assert len(waited) == 1, waited
            assert 0 <= len(steps) - before - (len(inbox.ids) - 1) <= 1


# ------------------------------------------------------------------ the host tier


def test_a_prefix_in_the_arena_changes_no_bit(
    cold: tuple[torch.dtype, list[Told]], prompts: list[Prompt]
) -> None:
    """What the tier is held against: the same without it."""
    dtype, want = cold
    runner = engine(dtype)
    for _ in range(2):
        for prompt, expected in zip(prompts, want, strict=True):
            assert ask(runner, prompt) == expected
    assert runner.stats().hit_tokens > 0


@pytest.mark.parametrize("encoding", [EncodeInStep, EncodeOnStream])
def test_what_comes_back_from_the_host_changes_no_bit(
    cold: tuple[torch.dtype, list[Told]], prompts: list[Prompt], encoding
) -> None:
    """A cache that holds two or three of the prompts, and a tier that holds most."""
    dtype, want = cold
    runner = engine(dtype, encoding, cache_bytes=5 * 2**20, host_cache_bytes=48 * 2**20)
    order = random.Random(3).choices(range(len(prompts)), k=60)
    for at in order:
        assert ask(runner, prompts[at]) == want[at]
    stats = runner.stats()
    assert stats.host_fetches > 0
    runner.close()


def test_traffic_over_a_small_tier_is_answered_as_without(
    cold: tuple[torch.dtype, list[Told]], prompts: list[Prompt]
) -> None:
    """The tier itself evicts: its memory is written again while copies are under way."""
    dtype, _ = cold
    small = {"cache_bytes": 6 * 2**20}
    want = traffic(engine(dtype, EncodeInStep, reuse=False, **small), prompts, 4, count=40)
    runner = engine(dtype, EncodeOnStream, host_cache_bytes=4 * 2**20, **small)
    assert traffic(runner, prompts, 4, count=40) == want
    stats = runner.stats()
    assert stats.host_fetches > 0
    assert stats.host_bytes <= 4 * 2**20


def test_units_are_copied_before_they_are_written_again() -> None:
    """Stores, fetches and writes of the same places wait in the device's queue, in order."""
    cache = engine(torch.bfloat16).cache
    tier = HostTier(cache, 3 * cache.sizes.unit_bytes)
    content = torch.randint(-(2**31), 2**31 - 1, (40, cache.units.shape[1]), dtype=torch.int32)
    source = content.cuda()
    torch.cuda.synchronize()
    end = asleep(torch.cuda.current_stream(), LONG)
    for turn in range(20):  # unit 0 and two rows of the tier, again and again
        cache.units[0] = source[2 * turn]
        tier.store(("page", 2 * turn), [0])
        cache.units[0] = source[2 * turn + 1]
        tier.store(("page", 2 * turn + 1), [0])
        cache.units[0].zero_()
        assert tier.fetch(("page", 2 * turn), [1 + 2 * turn])
        assert tier.fetch(("page", 2 * turn + 1), [2 + 2 * turn])
    assert not end.query(), "the host has waited for a copy"
    assert torch.equal(cache.units[1:41].cpu(), content)


def test_a_tier_locks_hardly_more_memory_than_it_was_given() -> None:
    cache = engine(torch.bfloat16).cache
    stats, most = torch.cuda.memory.host_memory_stats, 300 * 2**20
    before = stats()["allocated_bytes.current"]
    tier = HostTier(cache, most)
    tier.store(("page", 0), [0])
    assert stats()["allocated_bytes.current"] - before <= 1.01 * most + 2**24
