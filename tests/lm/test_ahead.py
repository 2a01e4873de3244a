"""Media encoded on a thread of their own: the same tokens, nothing lost, nobody waits in vain."""

from __future__ import annotations

import queue
import threading
import time

import pytest
import torch

from k3vl.errors import BackendError, Cancelled
from k3vl.lm.ahead import EncodeAhead
from k3vl.lm.engine import Engine, EngineConfig
from k3vl.lm.local import LocalBackend
from k3vl.types import EncoderItem, MediaSpan, Prompt, SamplingParams
from tests.lm.test_engine import PROMPTS, STOP, FakeEncoder, alone, drain, picture
from tests.timing import until
from tests.tiny import tiny_model, tokens

__all__ = ["alone"]
SHORT = SamplingParams(max_tokens=12)
TEXT = Prompt(tuple(tokens(20, seed=9)))


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


def backend(encoder: FakeEncoder, **limits) -> LocalBackend:
    config = EngineConfig(**{"max_requests": 3, "cache_bytes": 2**20, "page_size": 16, **limits})
    ahead = EncodeAhead(encoder)
    return LocalBackend(Engine(tiny_model(), ahead, config, stop_ids=(STOP,)), ahead=ahead)


@pytest.fixture
def encoder() -> GatedEncoder:
    return GatedEncoder()


def submit(served: LocalBackend, prompt: Prompt, sampling: SamplingParams = SHORT):
    inbox = queue.SimpleQueue()
    return served.submit(prompt, sampling, inbox.put), inbox


def text(inbox: queue.SimpleQueue) -> list[int]:
    return [token.id for token in drain(inbox)]


# ---------------------------------------------------------------------- the shelf


def test_what_was_prepared_is_handed_out_once(encoder: GatedEncoder) -> None:
    ahead = EncodeAhead(encoder)
    one, two = picture(1), picture(2)
    ahead.prepare(one, None)
    ahead.prepare(one, None)
    assert encoder.encoded == [one.digest], "it lies there already"
    first, second = ahead.encode([two, one])
    assert encoder.encoded == [one.digest, two.digest]
    assert torch.equal(second, FakeEncoder().encode([one])[0])
    assert torch.equal(first, FakeEncoder().encode([two])[0])
    assert torch.equal(ahead.encode([one])[0], second), "made anew"
    assert len(encoder.encoded) == 3
    assert ahead.seconds > 0


def test_the_shelf_is_bounded_and_loses_its_oldest(encoder: GatedEncoder) -> None:
    rows = FakeEncoder().encode([picture(0)])[0]
    ahead = EncodeAhead(encoder, max_bytes=2 * rows.nbytes)
    for number in range(4):
        ahead.prepare(picture(number), None)
    ahead.encode([picture(number) for number in range(4)])
    counts = [encoder.encoded.count(picture(number).digest) for number in range(4)]
    assert counts == [2, 2, 1, 1]


def test_other_salts_learn_nothing_from_the_shelf(encoder: GatedEncoder) -> None:
    ahead = EncodeAhead(encoder)
    ahead.prepare(picture(1), "mine")
    ahead.prepare(picture(1), "yours")
    assert len(encoder.encoded) == 2


# ---------------------------------------------------------------------- the two threads


def test_answers_are_those_of_one_thread(alone: list[list[int]], encoder: GatedEncoder) -> None:
    served = backend(encoder)
    inboxes = [submit(served, item)[1] for item in PROMPTS]
    assert [text(inbox) for inbox in inboxes] == alone
    assert set(encoder.threads) == {"k3vl-encoder"}
    assert len(encoder.encoded) == len(set(encoder.encoded)), "none is made twice"
    _, inbox = submit(served, PROMPTS[0])
    before = len(encoder.encoded)
    assert text(inbox) == alone[0]
    assert len(encoder.encoded) == before, "the engine has kept them"
    served.close()


def test_text_does_not_wait_for_pictures(encoder: GatedEncoder) -> None:
    served = backend(encoder)
    encoder.gate.clear()
    _, slow = submit(served, PROMPTS[0])
    assert encoder.entered.wait(60)
    _, quick = submit(served, TEXT)
    assert text(quick)
    assert slow.empty()
    assert served.stats().waiting == 1
    encoder.gate.set()
    assert text(slow)
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
    assert text(after)
    assert inbox.empty()
    assert behind.empty()
    assert not {s.item.digest for s in PROMPTS[2].spans} & set(encoder.encoded)
    assert served.stats().waiting == 0
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
    bad = picture(7)
    spans = (MediaSpan(4, EncoderItem("bad", bad.patches, bad.grid_thw, bad.num_tokens)),)
    _, failing = submit(served, Prompt(tuple(tokens(30, seed=7)), spans))
    _, good = submit(served, PROMPTS[1])
    assert isinstance(drain(failing)[-1], BackendError)
    assert text(good) == alone[1]
    served.close()


def test_idle_is_the_time_without_any_request(encoder: GatedEncoder) -> None:
    served = backend(encoder)
    until(lambda: served.stats().idle_seconds >= 0.2)
    encoder.gate.clear()
    _, inbox = submit(served, PROMPTS[0])
    text(submit(served, TEXT)[1])
    busy = served.stats().idle_seconds
    time.sleep(0.2)
    assert served.stats().idle_seconds == busy, "one is being encoded"
    encoder.gate.set()
    text(inbox)
    until(lambda: served.stats().idle_seconds > busy + 0.2)
    served.close()


class OtherEncoder(FakeEncoder):
    """The features of other weights."""

    def encode(self, items):
        return [-rows for rows in super().encode(items)]


def test_weights_that_change_take_no_features_of_the_old(encoder: GatedEncoder) -> None:
    """What came before them is answered by the old ones, what comes after by the new."""
    other = Engine(tiny_model(), OtherEncoder(), EngineConfig(page_size=16), stop_ids=(STOP,))
    fresh = LocalBackend(other)
    expected = text(submit(fresh, PROMPTS[0])[1])
    fresh.close()
    served = backend(encoder)
    old = text(submit(served, PROMPTS[0])[1])
    assert old != expected
    encoder.gate.clear()
    encoder.entered.clear()
    _, before = submit(served, PROMPTS[2])
    assert encoder.entered.wait(60)
    updating = threading.Thread(target=served.update, args=(tiny_model(), OtherEncoder()))
    updating.start()
    until(lambda: served._updates_behind)
    _, after = submit(served, PROMPTS[0])
    encoder.gate.set()
    assert text(before)
    assert text(after) == expected
    updating.join(60)
    assert text(submit(served, PROMPTS[0])[1]) == expected
    served.close()
