"""Media encoded beside the language model: the same bits, nothing lost, nobody waits in vain."""

from __future__ import annotations

import os
import queue
import random
import threading
import time
from contextlib import contextmanager

import pytest
import torch

import k3vl.load
from k3vl.errors import BackendError, Cancelled
from k3vl.lm.arena import Entry
from k3vl.lm.encoding import EncodeInStep, EncodeOnStream, EncodeOnThread, encode_each
from k3vl.lm.engine import Engine, EngineConfig
from k3vl.lm.features import Feature, MediaItem
from k3vl.lm.local import LocalBackend
from k3vl.types import EncoderItem, MediaSpan, Prompt, SamplingParams
from tests.lm.test_engine import PROMPTS, STOP, FakeEncoder, Inbox, alone, drain, picture
from tests.lm.test_reuse import MODELS, Answer, cold, engine, finish, watch, with_media
from tests.timing import until
from tests.tiny import tiny_model, tokens

__all__ = ["alone"]
SHORT = SamplingParams(max_tokens=12)
TEXT = Prompt(tuple(tokens(20, seed=9)))
ONE = Prompt(tuple(tokens(30, seed=1)), (MediaSpan(4, picture(11)),))
BAD = EncoderItem("bad", picture(7).patches, picture(7).grid_thw, picture(7).num_tokens)


class GatedEncoder(FakeEncoder):
    """Notes which thread encodes what; ``gate`` holds the work up while it is shut."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[str] = []
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def encode(self, items):
        self.threads.append(threading.current_thread().name)
        self.entered.set()
        assert self.gate.wait(60)
        return super().encode(items)


class OtherEncoder(FakeEncoder):
    """The features of other weights."""

    def encode(self, items):
        return [-rows for rows in super().encode(items)]


def threaded(encoder: FakeEncoder, **limits) -> Engine:
    config = EngineConfig(**{"max_requests": 3, "cache_bytes": 2**20, "page_size": 16, **limits})
    return Engine(tiny_model(), encoder, config, stop_ids=(STOP,), encoding=EncodeOnThread)


def backend(encoder: FakeEncoder, **limits) -> LocalBackend:
    return LocalBackend(threaded(encoder, **limits))


@pytest.fixture
def encoder() -> GatedEncoder:
    return GatedEncoder()


def submit(served: LocalBackend, prompt: Prompt, sampling: SamplingParams = SHORT):
    inbox = queue.SimpleQueue()
    return served.submit(prompt, sampling, inbox.put), inbox


def answer(inbox: queue.SimpleQueue) -> list[int]:
    return [token.id for token in drain(inbox)]


# ---------------------------------------------------------------------- the seam


def wanted(item: EncoderItem) -> tuple[Feature, EncoderItem]:
    """An item with a feature that somebody holds."""
    entry = Entry(kind="features", units=(0,), value=float, on_evict=list, refs=1)
    entry.kept = True
    key = (None, item.digest)
    media = MediaItem(offset=0, num_tokens=item.num_tokens, patches=4, key=key)
    return Feature(item=media, entry=entry), item


def take_each(encoding, count: int) -> list[tuple[str, torch.Tensor | BackendError]]:
    """So many, an item as often as it was started."""
    made = []
    while len(made) < count:
        taken = encoding.take(wait=True)
        assert taken
        made += [(feature.item.key[1], rows) for feature, rows in taken]
    assert len(made) == count, "more were under way"
    return made


def take_all(encoding, count: int) -> dict[str, torch.Tensor | BackendError]:
    """So many, all of different items."""
    made = dict(take_each(encoding, count))
    assert len(made) == count
    return made


@pytest.mark.parametrize("make", [EncodeInStep, EncodeOnThread])
def test_one_bad_item_leaves_the_others_their_rows(make, encoder: GatedEncoder) -> None:
    encoding = make(encoder)
    assert encoding.take(wait=True) == [], "nothing is under way"
    items = [picture(1), BAD, picture(2)]
    encoding.start([wanted(item) for item in items])
    made = take_all(encoding, 3)
    for item in (items[0], items[2]):
        assert torch.equal(made[item.digest], FakeEncoder().encode([item])[0])
    assert isinstance(made["bad"], BackendError)
    assert "ValueError" in str(made["bad"])
    assert encoding.take(wait=False) == []
    assert encoding.seconds > 0
    encoding.renew(OtherEncoder())
    encoding.start([wanted(items[0])])
    (other,) = take_all(encoding, 1).values()
    assert torch.equal(other, OtherEncoder().encode([items[0]])[0])
    encoding.close()


def test_the_thread_leaves_out_what_nobody_holds_any_more(encoder: GatedEncoder) -> None:
    encoding = EncodeOnThread(encoder)
    encoder.gate.clear()
    pairs = [wanted(picture(number)) for number in range(4)]
    encoding.start(pairs)
    assert encoder.entered.wait(60)
    pairs[1][0].entry.kept = pairs[2][0].entry.kept = False
    encoder.gate.set()
    assert set(take_all(encoding, 2)) == {picture(0).digest, picture(3).digest}
    assert len(encoder.encoded) == 2
    encoding.close()


def test_a_wait_can_be_ended(encoder: GatedEncoder) -> None:
    encoding = EncodeOnThread(encoder)
    encoder.gate.clear()
    encoding.start([wanted(picture(1))])
    taken = []
    waiter = threading.Thread(target=lambda: taken.append(encoding.take(wait=True)))
    waiter.start()
    waiter.join(0.1)
    assert waiter.is_alive()
    encoding.wake()
    waiter.join(60)
    assert taken == [[]]
    encoding.wake()
    for wait in (False, True):
        assert encoding.take(wait=wait) == [], "it came before the wait"
    encoder.gate.set()
    take_all(encoding, 1)
    encoding.close()
    assert not any(thread.name == "k3vl-encoder" for thread in threading.enumerate())


def test_who_would_only_wait_helps(encoder: GatedEncoder) -> None:
    """Once the thread has encoded something, and as long as something is left to begin."""
    encoding = EncodeOnThread(encoder)
    encoding.start([wanted(picture(0))])
    take_all(encoding, 1)
    encoding.start([wanted(picture(number)) for number in range(1, 9)])
    take_all(encoding, 8)
    me = threading.current_thread().name
    assert encoder.threads[0] == "k3vl-encoder"
    assert set(encoder.threads) == {"k3vl-encoder", me}
    assert len(encoder.encoded) == len(set(encoder.encoded)) == 9
    for number in range(9, 20):
        encoding.start([wanted(picture(number))])
        take_all(encoding, 1)
        assert encoder.threads[-1] == "k3vl-encoder", "a lone one is not for the engine's thread"
    encoding.close()


def test_other_weights_wait_for_the_item_that_is_being_encoded(encoder: GatedEncoder) -> None:
    encoding = EncodeOnThread(encoder)
    encoder.gate.clear()
    pairs = [wanted(picture(number)) for number in range(2)]
    encoding.start(pairs)
    assert encoder.entered.wait(60)
    for feature, _ in pairs:
        feature.entry.kept = False
    threading.Timer(0.1, encoder.gate.set).start()
    encoding.renew(OtherEncoder())
    assert encoder.encoded == [picture(0).digest]
    assert encoding.take(wait=True) == [], "rows of the old weights are gone"
    encoding.close()


# ---------------------------------------------------------------------- a stream


class FakeCuda:
    """What ``EncodeOnStream`` uses of ``torch.cuda``; work is done when ``finish`` is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.current = self.main = FakeStream(self, "main")
        self.unfinished: list[FakeEvent] = []
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: FakeStream(self, "side"))
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: FakeEvent(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.use)

    @contextmanager
    def use(self, stream: FakeStream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def finish(self) -> None:
        for event in self.unfinished:
            event.done = True


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name
        self.device, self.cuda_stream = None, id(self)

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.log.append(f"{self.name} waits for an event of {event.stream.name}")

    def synchronize(self) -> None:
        self.cuda.log.append("the host waits")


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.done = cuda, False

    def record(self) -> None:
        self.stream = self.cuda.current
        self.cuda.unfinished.append(self)

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.done
        assert end.done
        return 1500.0


class Rows(torch.Tensor):
    """Rows that note which stream reads them."""

    def record_stream(self, stream) -> None:
        stream.cuda.log.append(f"rows are read on {stream.name}")


class DeviceEncoder(FakeEncoder):
    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda = cuda

    def encode(self, items):
        self.cuda.log.append(f"{len(items)} encoded on {self.cuda.current.name}")
        return [rows.as_subclass(Rows) for rows in super().encode(items)]


def test_a_stream_hands_out_rows_behind_their_event(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    encoding = EncodeOnStream(DeviceEncoder(cuda))
    assert cuda.log == ["main waits for side", "side waits for main"], "the weights"
    encoding.start([wanted(picture(1)), wanted(picture(2))])
    encoding.start([wanted(picture(3))])
    assert encoding.take(wait=False) == [], "others go on meanwhile"
    cuda.finish()
    assert len(encoding.take(wait=False)) == 3
    assert encoding.seconds == 3.0
    assert cuda.log[2:] == [
        "2 encoded on side",
        "1 encoded on side",
        "main waits for an event of side",
        *["rows are read on main"] * 2,
        "main waits for an event of side",
        "rows are read on main",
    ]
    assert cuda.current is cuda.main


def test_rows_of_one_batch_are_one_memory_to_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    rows = torch.zeros(4, 8).as_subclass(Rows)

    class Joint(FakeEncoder):
        def encode(self, items):
            return list(rows.split([2] * len(items)))

    encoding = EncodeOnStream(Joint())
    encoding.start([wanted(picture(1)), wanted(picture(2))])
    cuda.finish()
    assert len(encoding.take(wait=False)) == 2
    assert cuda.log[-2:] == ["main waits for an event of side", "rows are read on main"]


def test_a_stream_waits_on_the_device_and_for_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    encoding = EncodeOnStream(DeviceEncoder(cuda))
    for items in ([picture(1), BAD], [picture(2)]):
        encoding.start([wanted(item) for item in items])
    made = encoding.take(wait=True)
    assert [feature.item.key[1] for feature, _ in made] == [picture(1).digest, "bad"]
    assert isinstance(made[1][1], BackendError)
    assert encoding.seconds == 0, "it still runs"
    encoding.renew(DeviceEncoder(cuda))
    assert encoding.take(wait=True) == []
    assert "the host waits" not in cuda.log
    encoding.close()


def test_an_item_that_is_started_twice_is_handed_out_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many are done by the time that somebody takes them."""
    for finished in range(7):
        cuda = FakeCuda(monkeypatch)
        encoding = EncodeOnStream(DeviceEncoder(cuda))
        order = [1, 2, 3, 3, 2, 1]
        for number, at in enumerate(order):
            encoding.start([wanted(picture(at))])
            if number + 1 == finished:
                cuda.finish()
        made = take_each(encoding, len(order))
        assert [digest for digest, _ in made] == [picture(at).digest for at in order]
        for (_, rows), at in zip(made, order, strict=True):
            assert torch.equal(rows, FakeEncoder().encode([picture(at)])[0])
        assert encoding.take(wait=True) == []


def test_an_engine_with_a_stream_gives_the_same_tokens(
    alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch)
    config = EngineConfig(max_requests=3, cache_bytes=2**20, page_size=16)
    runner = Engine(
        tiny_model(), DeviceEncoder(cuda), config, stop_ids=(STOP,), encoding=EncodeOnStream
    )
    inboxes = [Inbox() for _ in PROMPTS]
    for number, (item, inbox) in enumerate(zip(PROMPTS, inboxes, strict=True)):
        runner.add(number, item, SHORT, inbox)
    steps = 0
    while runner.jobs:
        if steps % 3 == 2:
            cuda.finish()
        runner.step()
        steps += 1
    assert [inbox.ids for inbox in inboxes] == alone


# ---------------------------------------------------------------------- the engine


class Late:
    """Hands rows out steps later and in any order, by a dice that can be thrown again."""

    beside, seconds = True, 0.0

    def __init__(self, encoder: FakeEncoder, seed: int = 0) -> None:
        self.encoder, self.rng, self.pending = encoder, random.Random(seed), []
        self.waits = 0

    def start(self, wanted) -> None:
        self.pending += wanted

    def take(self, *, wait: bool):
        self.rng.shuffle(self.pending)
        ready = sum(self.rng.random() < 0.2 for _ in self.pending)
        if wait and self.pending and not ready:
            ready, self.waits = 1, self.waits + 1
        done, self.pending = self.pending[:ready], self.pending[ready:]
        # As the thread does: what it has begun it hands out, held or not.
        held = [each for each in done if each[0].entry.kept or self.rng.random() < 0.5]
        return list(encode_each(self.encoder, held))

    def wake(self) -> None:
        pass

    def renew(self, encoder: FakeEncoder) -> None:
        self.encoder, self.pending = encoder, []

    def close(self) -> None:
        pass


@pytest.mark.parametrize("units", range(14, 60, 15))
@pytest.mark.parametrize("kernels", [name for name in MODELS if name != "now"])
def test_late_features_change_no_bit(
    units: int, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any budget, with prefixes, preemption, pictures that are dropped and asked for again."""
    monkeypatch.setitem(MODELS, "now", MODELS[kernels])
    watch(monkeypatch)
    unit = engine().scheduler.sizes.unit_bytes
    limits = {"cache_bytes": units * unit, "prefill_chunk": 32, "max_step_patches": 120}
    runner = engine(**limits, encoding=Late)
    prompts = [with_media(90 + 3 * i, tail=i, first=1 + i % 2) for i in range(4)]
    want = [cold(prompt) for prompt in prompts]
    rng = random.Random(units)
    for _ in range(4):
        order = [rng.randrange(4) for _ in range(5)]
        answers = [Answer(runner, n, prompts[i]) for n, i in enumerate(order)]
        gone = rng.randrange(5)
        for _ in range(rng.randrange(6)):
            runner.step()
        runner.cancel(gone)
        finish(runner)
        for number, (got, i) in enumerate(zip(answers, order, strict=True)):
            assert number == gone or got.same_as(want[i])
    assert runner.encoding.waits, "nothing else was left to do"
    assert runner.scheduler.arena.num_available == units


def test_a_picture_whose_request_was_cancelled_comes_again(encoder: GatedEncoder) -> None:
    runner, first, second = threaded(encoder), Inbox(), Inbox()
    encoder.gate.clear()
    prompt = Prompt(tuple(tokens(30, seed=1)), (MediaSpan(20, picture(1)),))
    runner.add(0, prompt, SHORT, first)
    runner.step()
    assert encoder.entered.wait(60)
    runner.cancel(0)
    runner.add(1, prompt, SHORT, second)
    runner.wake()
    runner.step()
    assert not second.items
    encoder.gate.set()
    while runner.jobs:
        runner.step()
        runner.scheduler.check_integrity()
    assert len(second.ids) == 12
    runner.close()


def test_a_step_with_nothing_else_to_do_waits_for_the_encoder(encoder: GatedEncoder) -> None:
    runner, inbox = threaded(encoder), Inbox()
    encoder.gate.clear()
    runner.add(0, ONE, SHORT, inbox)
    steps = []
    looping = threading.Thread(target=lambda: [steps.append(1) for _ in iter(runner.step, False)])
    looping.start()
    assert encoder.entered.wait(60)
    looping.join(0.3)
    assert not steps, "it stands still"
    encoder.gate.set()
    looping.join(60)
    assert inbox.ended
    assert len(steps) == 1 + len(inbox.ids), "one to encode, one a token"
    stages = runner.stats().stage_seconds
    assert stages["wait"] >= 0.3
    assert stages["encode"] >= 0.3
    runner.close()


def test_an_engine_that_is_closed_leaves_no_thread(encoder: GatedEncoder) -> None:
    runner, inbox = threaded(encoder), Inbox()
    runner.add(0, PROMPTS[0], SHORT, inbox)
    runner.step()
    runner.close()
    assert isinstance(inbox.items[-1], Cancelled)
    assert not any(thread.name == "k3vl-encoder" for thread in threading.enumerate())


# ---------------------------------------------------------------------- the two threads


def test_answers_are_those_of_one_thread(alone: list[list[int]], encoder: GatedEncoder) -> None:
    served = backend(encoder)
    inboxes = [submit(served, item)[1] for item in PROMPTS]
    assert [answer(inbox) for inbox in inboxes] == alone
    assert "k3vl-encoder" in encoder.threads
    assert len(encoder.encoded) == len(set(encoder.encoded)), "none is made twice"
    _, inbox = submit(served, PROMPTS[0])
    before = len(encoder.encoded)
    assert answer(inbox) == alone[0]
    assert len(encoder.encoded) == before, "the engine has kept them"
    served.close()


def test_text_does_not_wait_for_pictures(encoder: GatedEncoder) -> None:
    served = backend(encoder)
    encoder.gate.clear()
    _, slow = submit(served, ONE)
    assert encoder.entered.wait(60)
    _, quick = submit(served, TEXT)
    assert answer(quick)
    assert slow.empty()
    assert served.stats().running == 1
    encoder.gate.set()
    assert answer(slow)
    served.close()


def test_a_request_is_cancelled_while_its_media_are_encoded(encoder: GatedEncoder) -> None:
    served = backend(encoder)
    encoder.gate.clear()
    first, inbox = submit(served, PROMPTS[0])
    second, behind = submit(served, PROMPTS[2])
    assert encoder.entered.wait(60)
    served.cancel(second)
    served.cancel(first)
    served.cancel(first)
    for each in (inbox, behind):
        assert isinstance(each.get(timeout=60), Cancelled)
    encoder.gate.set()
    _, after = submit(served, PROMPTS[4])
    assert answer(after)
    assert inbox.empty()
    assert behind.empty()
    assert not {s.item.digest for s in PROMPTS[2].spans} & set(encoder.encoded)
    assert served.stats().waiting == served.stats().running == 0
    served.close()


def test_closing_ends_what_is_being_encoded(encoder: GatedEncoder) -> None:
    served = backend(encoder)
    encoder.gate.clear()
    inboxes = [submit(served, item)[1] for item in PROMPTS[:2]]
    assert encoder.entered.wait(60)
    closing = threading.Thread(target=served.close)
    closing.start()
    for inbox in inboxes:
        assert isinstance(inbox.get(timeout=60), Cancelled)
    encoder.gate.set()
    closing.join(60)
    assert not closing.is_alive()
    assert all(inbox.empty() for inbox in inboxes), "they hear of it once"
    with pytest.raises(BackendError, match="closed"):
        submit(served, TEXT)


def test_a_dead_engine_fails_those_that_are_being_encoded(encoder: GatedEncoder) -> None:
    served = backend(encoder)

    def broken(batch, cache):
        raise RuntimeError("out of memory")

    served._engine.model.forward = broken
    encoder.gate.clear()
    _, inbox = submit(served, PROMPTS[0])
    assert encoder.entered.wait(60)
    _, doomed = submit(served, TEXT)
    for each in (doomed, inbox):
        error = each.get(timeout=60)
        assert isinstance(error, BackendError)
        assert "out of memory" in str(error)
    encoder.gate.set()
    served.close()
    assert inbox.empty()


def test_a_picture_that_cannot_be_encoded_fails_its_request_alone(
    alone: list[list[int]], encoder: GatedEncoder
) -> None:
    served = backend(encoder)
    _, failing = submit(served, Prompt(tuple(tokens(30, seed=7)), (MediaSpan(4, BAD),)))
    _, good = submit(served, PROMPTS[1])
    assert isinstance(drain(failing)[-1], BackendError)
    assert answer(good) == alone[1]
    served.close()


def test_idle_is_the_time_without_any_request(encoder: GatedEncoder) -> None:
    served = backend(encoder)
    until(lambda: served.stats().idle_seconds >= 0.2)
    encoder.gate.clear()
    _, inbox = submit(served, PROMPTS[0])
    answer(submit(served, TEXT)[1])
    busy = served.stats().idle_seconds
    time.sleep(0.2)
    assert served.stats().idle_seconds == busy, "one is being encoded"
    encoder.gate.set()
    answer(inbox)
    until(lambda: served.stats().idle_seconds > busy + 0.2)
    served.close()


def test_weights_that_change_take_no_features_of_the_old(encoder: GatedEncoder) -> None:
    """What came before them is answered by the old ones, what comes after by the new."""
    other = Engine(tiny_model(), OtherEncoder(), EngineConfig(page_size=16), stop_ids=(STOP,))
    fresh = LocalBackend(other)
    expected = answer(submit(fresh, PROMPTS[0])[1])
    fresh.close()
    served = backend(encoder)
    old = answer(submit(served, PROMPTS[0])[1])
    assert old != expected
    encoder.gate.clear()
    encoder.entered.clear()
    _, before = submit(served, ONE)
    assert encoder.entered.wait(60)
    updating = threading.Thread(target=served.update, args=(tiny_model(), OtherEncoder()))
    updating.start()
    until(lambda: served._updates)
    _, after = submit(served, PROMPTS[0])
    encoder.gate.set()
    assert answer(before)
    assert answer(after) == expected
    updating.join(60)
    assert answer(submit(served, PROMPTS[0])[1]) == expected
    served.close()


# ---------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("device", "threads", "cores", "chosen"),
    [
        ("cpu", 1, 2, EncodeOnThread),
        ("cpu", 1, 1, EncodeInStep),
        ("cpu", None, 8, EncodeInStep),
        ("cuda", None, 8, EncodeOnStream),
    ],
)
def test_device_and_cores_decide_who_encodes(
    device: str, threads: int | None, cores: int, chosen: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(k3vl.load, "usable_cores", lambda: cores)
    made = k3vl.load.choose_encoding(torch.device(device), EngineConfig(num_threads=threads))
    assert getattr(made, "func", made) is chosen


def test_this_process_may_use_a_core() -> None:
    assert 1 <= k3vl.load.usable_cores() <= os.cpu_count()
