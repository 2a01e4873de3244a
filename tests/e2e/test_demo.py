"""The demo checkpoint end to end: files on disk to text, whatever the batch, chunks and caches."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from k3vl.app.cli import cli
from k3vl.lm.engine import EngineConfig
from k3vl.load import choose_bulk_processor
from k3vl.pipeline import Pipeline
from k3vl.types import (
    ChatOptions,
    Content,
    Finish,
    MediaPart,
    Message,
    Reasoning,
    SamplingParams,
    TextPart,
)
from k3vl.vision.inspect import kind_of
from k3vl.vision.pool import PooledProcessor
from tests.e2e import heldout_answers
from tests.vision.files import noise

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LABELS = [json.loads(line) for line in (EXAMPLES / "labels.jsonl").read_text().splitlines()]
THREADS = {"num_threads": 1}


def question(label: dict, prompt: str | None = None) -> list[Message]:
    path = EXAMPLES / label["file"]
    parts = (MediaPart(kind_of(path), path), TextPart(prompt or label["prompt"]))
    return [Message(role="user", parts=parts)]


@pytest.fixture(scope="module")
def demo():
    with Pipeline.load() as pipeline:
        yield pipeline


@pytest.fixture(scope="module")
def alone(demo) -> list[str]:
    """Every example's answer by itself."""
    return [demo.reply(question(label)).content for label in LABELS]


@pytest.mark.parametrize("label", LABELS, ids=lambda label: label["file"])
def test_the_examples_are_answered_right(demo, label: dict) -> None:
    reply = demo.reply(question(label))
    assert reply.content == label["expected"]
    assert reply.finish == "stop"
    assert reply.reasoning == ""
    tokens = (
        reply.usage.video_tokens if label["file"].endswith(".mp4") else reply.usage.image_tokens
    )
    assert tokens == sum(group.num_tokens for media in reply.media for group in media.groups)


def test_a_sideways_file_is_seen_upright(demo) -> None:
    reply = demo.reply(question({"file": "guitar-sideways.jpg", "prompt": "What is this?"}))
    assert reply.content == "A guitar."
    assert reply.media[0].height > reply.media[0].width, "the file itself is wider than high"


def test_together_is_as_alone(demo, alone) -> None:
    requests = [demo.request(question(label)) for label in LABELS]
    assert [reply.content for reply in demo.replies(requests, in_flight=9)] == alone


def test_decoding_in_other_processes_changes_nothing(demo, alone) -> None:
    """Cold, and with what the pool, the pipeline and the engine have kept of it."""
    assert demo.bulk_processor is demo.processor, "a CPU has the model to compute"
    pool = choose_bulk_processor(torch.device("cuda"), demo.processor, keep_bytes=2**20)
    assert isinstance(pool, PooledProcessor)
    requests = [demo.request(question(label)) for label in LABELS]
    demo.bulk_processor = pool
    try:
        for _ in range(2):
            assert [reply.content for reply in demo.replies(requests, in_flight=9)] == alone
    finally:
        demo.bulk_processor = demo.processor
        pool.close()


@pytest.mark.parametrize("chunk", [1, 7, 16, 61])
def test_any_prefill_chunk_is_as_whole(alone, chunk: int) -> None:
    config = EngineConfig(prefill_chunk=chunk, max_step_tokens=chunk + 9, **THREADS)
    with Pipeline.load(engine=config) as pipeline:
        requests = [pipeline.request(question(label)) for label in LABELS]
        assert [reply.content for reply in pipeline.replies(requests)] == alone


def test_the_caches_change_nothing(demo, alone) -> None:
    """Answers of warm caches, and of none at all."""
    before = demo.stats()
    replies = [demo.reply(question(label)) for label in LABELS]
    assert [reply.content for reply in replies] == alone
    assert sum(reply.usage.cached_tokens > 0 for reply in replies) > len(LABELS) // 2
    assert demo.stats().hit_tokens - before.hit_tokens == sum(
        reply.usage.cached_tokens for reply in replies
    )
    config = EngineConfig(reuse=False, **THREADS)
    with Pipeline.load(engine=config) as pipeline:
        for _ in range(2):
            assert [pipeline.reply(question(label)).content for label in LABELS] == alone
        assert pipeline.stats().hit_tokens == 0


def test_pictures_of_equal_bytes_are_told_apart(demo) -> None:
    """The same pixel bytes with another palette, and in another shape, in a warm engine."""
    data = bytes(range(256)) * 256
    pictures = []
    for size, shift in (((256, 256), 0), ((256, 256), 85), ((128, 512), 0)):
        image = Image.frombytes("P", size, data)
        image.putpalette([(i * 3 + shift * (i % 3)) % 256 for i in range(768)])
        pictures.append(image)
    assert pictures[0].tobytes() == pictures[1].tobytes() == pictures[2].tobytes()
    questions = [
        [Message(role="user", parts=(MediaPart("image", image), TextPart("Describe the image.")))]
        for image in pictures
    ]
    spans = [demo.prepare(demo.request(asked)).prompt.spans[0] for asked in questions]
    assert len({span.item.digest for span in spans}) == 3
    with Pipeline.load(engine=EngineConfig(reuse=False, **THREADS)) as cold:
        want = [cold.reply(asked).content for asked in questions]
    for i in (0, 1, 2, 0, 2, 1):
        assert demo.reply(questions[i]).content == want[i]


def test_turns_remember_the_picture(demo) -> None:
    first = question(LABELS[0], "Describe the image.")
    answer = Message(role="assistant", parts=(TextPart(demo.reply(first).content),))
    second = Message(role="user", parts=(TextPart("Is there a kite in the picture?"),))
    assert demo.reply([*first, answer, second]).content == "Yes."
    third = Message(role="user", parts=(TextPart("Is there an owl in the picture?"),))
    assert demo.reply([*first, answer, third]).content == "No."


def test_a_turn_goes_on_behind_the_answer(demo) -> None:
    """The answer's tokens are rendered as they were generated, and its state was kept."""
    first = question(LABELS[0], "Describe the image.")
    reply = demo.reply(first)
    answer = Message(role="assistant", parts=(TextPart(reply.content),))
    second = [*first, answer, Message(role="user", parts=(TextPart("How many things are there?"),))]
    prompts = [demo.prepare(demo.request(turn)).prompt.token_ids for turn in (first, second)]
    assert prompts[1][: len(prompts[0])] == prompts[0]
    warm = demo.reply(second)
    behind = len(prompts[0]) + reply.usage.completion_tokens - 1
    assert warm.usage.cached_tokens == behind // 16 * 16 > len(prompts[0])
    with Pipeline.load(engine=EngineConfig(reuse=False, **THREADS)) as cold:
        assert warm.content == cold.reply(second).content


def test_two_pictures_are_told_apart(demo) -> None:
    parts = [*question(LABELS[0])[0].parts[:1], *question(LABELS[2])[0].parts[:1]]
    ids = demo.prepare(demo.request([Message(role="user", parts=tuple(parts))])).prompt.spans
    assert len(ids) == 2
    assert ids[0].item.digest != ids[1].item.digest


def test_thinking_comes_first_and_apart(demo) -> None:
    options = ChatOptions(thinking=True, thinking_effort="low")
    events = list(demo.events(question(LABELS[0], "Describe the image."), options=options))
    kinds = [type(event) for event in events]
    assert kinds[-1] is Finish
    assert "".join(e.text for e in events if isinstance(e, Content)) == LABELS[0]["expected"]
    assert Reasoning not in kinds[kinds.index(Content) :]


def test_sampling_repeats_by_seed(demo) -> None:
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=20)
    first = demo.reply(question(LABELS[0]), sampling=params).content
    assert demo.reply(question(LABELS[0]), sampling=params).content == first


def test_streams_and_plain_calls_agree(demo, alone) -> None:
    async def read(label: dict) -> str:
        return "".join(
            [e.text async for e in demo.stream(question(label)) if isinstance(e, Content)]
        )

    async def all_at_once() -> list[str]:
        return await asyncio.gather(*(read(label) for label in LABELS))

    assert asyncio.run(all_at_once()) == alone


def test_leaving_early_frees_the_engine(demo) -> None:
    scheduler = demo.backend._engine.scheduler

    def leave() -> None:
        events = demo.events(question(LABELS[0]))
        next(events)
        events.close()

    threads = [threading.Thread(target=leave) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    demo.reply("Hello")  # behind all the cancellations
    scheduler.check_integrity()
    assert scheduler.arena.num_available == scheduler.arena.size


def test_the_command_captions_the_folder() -> None:
    result = CliRunner().invoke(cli, ["caption", str(EXAMPLES)])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) == len(LABELS)
    captions = dict(line.split(": ", 1) for line in lines)
    assert captions[str(EXAMPLES / "fox-kite-bus.png")] == "A fox, a kite and a bus."
    assert captions[str(EXAMPLES / "sailboat.mp4")] == "A sailboat moves from left to right."


def test_the_package_measures_itself() -> None:
    """``k3vl eval`` with the real model over a part of the questions that come with it."""
    result = CliRunner().invoke(cli, ["eval", "--quick", "--only", "yes", "--blanks", "8"])
    assert result.exit_code == 0, result.output
    row = next(line for line in result.stdout.splitlines() if "yes or no" in line)
    value, blank = (float(cell.split("%")[0].split()[-1]) for cell in row.split(" % ")[:2])
    assert value > 90
    assert blank <= 75, "mostly No: a grey picture shows nothing"


def test_answers_to_held_out_questions_are_the_recorded_ones(demo) -> None:
    """What ``-m gpu`` holds a GPU to is what a CPU says; a part of it here."""
    want = heldout_answers.recorded()
    assert len(want) == heldout_answers.COUNT
    got = heldout_answers.ask(demo, heldout_answers.questions()[::25], in_flight=8)
    assert len(got) == 8
    assert heldout_answers.differences(demo, got, want) == []
    key = min(got)
    other = {**got, key: (*got[key], 0)}
    assert len(heldout_answers.differences(demo, other, want)) == 1


def test_confidence_is_told_with_log_probabilities(demo) -> None:
    plain = demo.reply(question(LABELS[0]))
    asked = demo.reply(question(LABELS[0]), sampling=SamplingParams(logprobs=0))
    assert plain.confidence is None
    assert asked.content == plain.content
    assert 0.5 < asked.confidence <= 1
    grain = noise((224, 224), 90).convert("RGB")
    parts = (MediaPart("image", grain), TextPart("What is this?"))
    unsure = demo.reply(
        [Message(role="user", parts=parts)], sampling=SamplingParams(logprobs=0)
    ).confidence
    assert unsure < asked.confidence
