"""Many requests at once over fake backends: order, bounds, errors, and leaving early."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from k3vl.bulk import FROZEN_BY_PYTHON, HELD, only_new_garbage
from k3vl.errors import BackendError, MediaError
from k3vl.pipeline import Pipeline, Reply
from k3vl.types import MediaPart, Message, SamplingParams, TextPart
from k3vl.vision.processor import MediaProcessor
from tests.fakes import HeldBackend
from tests.test_pipeline import ANSWER, TOKENIZER, ask, pipeline, png

WORDS = TOKENIZER.encode_segment(ANSWER, allow_special=True)


def held_pipeline() -> tuple[Pipeline, HeldBackend]:
    pipe, backend = pipeline(), HeldBackend()
    pipe.backend = backend
    return pipe, backend


def wait_for(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not come to that"
        time.sleep(0.002)


def finish(backend: HeldBackend, number: int) -> None:
    """End one generation with an answer."""
    sink = backend.sinks.pop(number)
    only = HeldBackend(sinks={number: sink})
    only.send(*WORDS, finish="stop")


def test_replies_keep_their_order_and_errors_stay_with_their_request() -> None:
    pipe = pipeline()
    requests = [
        pipe.request(ask(MediaPart("image", b"" if i == 3 else png(28, 28)), TextPart(str(i))))
        for i in range(9)
    ]
    results = list(pipe.replies(iter(requests), in_flight=2))
    assert [isinstance(result, Reply) for result in results] == [i != 3 for i in range(9)]
    assert isinstance(results[3], MediaError)
    assert results[3].param == "messages[0].content[0]"
    alone = pipe.reply(requests[0])
    assert all(result == alone for i, result in enumerate(results) if i != 3)
    assert pipe.backend.cancelled == [8], "what has ended is not cancelled, but by reply()"


def test_a_slow_answer_holds_up_nobody_but_bounds_what_is_held() -> None:
    pipe, backend = held_pipeline()
    drawn = []

    def source():
        for i in range(100):
            drawn.append(i)
            yield pipe.request(str(i))

    got = []
    results = pipe.replies(source(), in_flight=2)
    reader = threading.Thread(target=lambda: got.append(next(results)))
    reader.start()
    for number in range(2, 2 * HELD + 1):  # all but the first that was submitted
        wait_for(lambda number=number: number in backend.sinks)
        assert len(backend.sinks) <= 2
        finish(backend, number)
    wait_for(lambda: len(drawn) == 2 * HELD)
    time.sleep(0.05)
    assert len(drawn) == 2 * HELD, "a million requests are not held at once"
    assert not got or backend.num_submitted == 2 * HELD
    finish(backend, 1)
    reader.join(20)
    assert isinstance(got[0], Reply)
    results.close()


def test_leaving_early_cancels_what_is_in_the_works() -> None:
    pipe, backend = held_pipeline()
    results = pipe.replies((pipe.request(str(i)) for i in range(9)), in_flight=3)
    starter = threading.Thread(target=lambda: next(results, None))
    starter.start()
    wait_for(lambda: len(backend.sinks) == 3)
    for number in list(backend.sinks):
        finish(backend, number)
    starter.join(20)
    wait_for(lambda: backend.num_submitted >= 3)
    results.close()
    assert not backend.sinks
    assert not [t for t in threading.enumerate() if t.name.startswith("k3vl-prepare")]


def test_a_defect_is_told_where_it_is_met() -> None:
    pipe = pipeline()
    requests = [pipe.request("a"), pipe.request("b")]
    write = pipe.writer.write

    def fails(request, media):
        if request is requests[1]:
            raise ZeroDivisionError
        return write(request, media)

    pipe.writer.write = fails
    results = pipe.replies(requests)
    assert isinstance(next(results), Reply)
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_a_source_that_fails_is_told_and_the_rest_cancelled() -> None:
    pipe, backend = held_pipeline()

    def source():
        yield pipe.request("a")
        raise OSError("the list has ended")

    with pytest.raises(OSError, match="list has ended"):
        next(pipe.replies(source(), in_flight=4))
    assert not backend.sinks


def test_a_stop_string_ends_an_answer_that_the_backend_would_go_on_with() -> None:
    pipe = pipeline("A cat. ", finish=None)
    requests = [pipe.request("hi", sampling=SamplingParams(stop=("cat",))) for _ in range(3)]
    assert [reply.content for reply in pipe.replies(requests)] == ["A "] * 3
    assert len(pipe.backend.cancelled) == 3


def test_errors_of_the_backend_are_told_in_place_of_replies() -> None:
    pipe = pipeline("", error=BackendError("gone"))
    assert [str(error) for error in pipe.replies([pipe.request("a")] * 2)] == ["gone"] * 2
    pipe, backend = held_pipeline()
    backend.is_dead = True
    results = list(pipe.replies([pipe.request("a")] * 2))
    assert [type(error) for error in results] == [BackendError] * 2


def test_media_are_prepared_by_the_processor_for_many() -> None:
    pipe = pipeline()
    seen = []

    class Other(type(pipe.processor)):
        def process(self, source, kind=None):
            seen.append(source)
            return super().process(source, kind)

    pipe.bulk_processor = Other(pipe.processor.config)
    message = Message(role="user", parts=(MediaPart("image", png(28, 28)),))
    assert len(list(pipe.replies([pipe.request([message])] * 2))) == 2
    assert len(seen) == 2
    pipe.reply([message])
    assert len(seen) == 2


class Elsewhere(MediaProcessor):
    """Others make the media; they are there when the test says so."""

    def __init__(self, config):
        super().__init__(config)
        self.begun = []

    def is_quick(self, part):
        return True

    def begin(self, part):
        self.begun.append((part, Future()))
        return self.begun[-1][1]

    def end(self, index, outcome=None):
        part, made = self.begun[index]
        if outcome is None:
            made.set_result(self.process(part))
        else:
            made.set_exception(outcome)


def elsewhere_pipeline() -> tuple[Pipeline, Elsewhere]:
    pipe = pipeline()
    pipe.bulk_processor = processor = Elsewhere(pipe.processor.config)
    return pipe, processor


def test_media_that_others_make_may_be_there_in_any_order() -> None:
    pipe, processor = elsewhere_pipeline()
    requests = [
        pipe.request(ask(MediaPart("image", png(28 * (i + 1), 28)), TextPart(str(i))))
        for i in range(4)
    ]
    results = pipe.replies(requests, in_flight=4)
    reader = ThreadPoolExecutor(1)
    got = reader.submit(list, results)
    wait_for(lambda: len(processor.begun) == 4)
    for index in (2, 0, 3, 1):
        processor.end(index)
    assert [reply.media[0].width for reply in got.result(20)] == [28, 56, 84, 112]
    reader.shutdown()


def test_the_first_part_that_fails_is_told_whichever_was_the_first_to() -> None:
    pipe, processor = elsewhere_pipeline()
    part = MediaPart("image", png(28, 28))
    requests = [pipe.request(ask(part, part, part)), pipe.request(ask(part))]
    reader = ThreadPoolExecutor(1)
    got = reader.submit(list, pipe.replies(requests))
    wait_for(lambda: len(processor.begun) == 4)
    processor.end(2, MediaError("third", code="image_failed"))
    processor.end(3)
    processor.end(1, MediaError("second", code="image_truncated"))
    processor.end(0)
    error, reply = got.result(20)
    assert (str(error), error.param, error.code) == (
        "messages[0].content[1]: second",
        "messages[0].content[1]",
        "image_truncated",
    )
    assert isinstance(reply, Reply)
    reader.shutdown()


def test_leaving_early_drops_media_that_others_have_not_made() -> None:
    pipe, processor = elsewhere_pipeline()
    part = MediaPart("image", png(28, 28))
    results = pipe.replies([pipe.request(ask(part)) for _ in range(5)], in_flight=3)
    reader = ThreadPoolExecutor(1)
    got = reader.submit(next, results)
    wait_for(lambda: len(processor.begun) == 3)
    processor.end(0)
    assert isinstance(got.result(20), Reply)
    reader.shutdown()
    results.close()
    assert all(made.cancelled() for _, made in processor.begun[1:])


def test_python_looks_for_new_garbage_only_while_a_run_lasts() -> None:
    before = gc.get_freeze_count()
    assert before <= FROZEN_BY_PYTHON
    pipe = pipeline()
    replies = pipe.replies(pipe.request(ask(TextPart(str(i)))) for i in range(9))
    next(replies)
    assert gc.get_freeze_count() > before + 10_000
    replies.close()
    assert gc.get_freeze_count() == 0, "one that is left early too"


def test_who_has_frozen_objects_keeps_them_so() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with only_new_garbage():
            held = [[] for _ in range(9)]
        assert len(held) == 9
        assert gc.get_freeze_count() == frozen
    finally:
        gc.unfreeze()
