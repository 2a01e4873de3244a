"""The pipeline over a fake backend: prompts, events, errors, cancellation."""

from __future__ import annotations

import asyncio
import io

import pytest
from PIL import Image

from k3vl.config import load_config, load_media_config
from k3vl.errors import BackendError, CapacityError, MediaError, TemplateError
from k3vl.pipeline import Pipeline
from k3vl.types import ChatOptions, Content, Finish, MediaPart, Message, SamplingParams, TextPart
from k3vl.vision.processor import MediaProcessor
from k3vl.xtml.tokenizer import load_tokenizer
from tests.fakes import FakeBackend
from tests.test_config import GOLDEN

DIRECTORY = GOLDEN / "sglang_tiny"
TOKENIZER = load_tokenizer(DIRECTORY)
PAD = load_config(DIRECTORY).media_placeholder_token_id
ANSWER = "A cat.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"


def pipeline(text: str = ANSWER, **backend) -> Pipeline:
    answer = TOKENIZER.encode_segment(text, allow_special=True)
    return Pipeline(
        processor=MediaProcessor(load_media_config(DIRECTORY)),
        tokenizer=TOKENIZER,
        backend=FakeBackend(answer, **backend),
        media_pad_id=PAD,
        defaults=ChatOptions(thinking=False),
        name="tiny",
    )


def png(width: int, height: int, colour: str = "red") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(stream, "PNG")
    return stream.getvalue()


def ask(*parts) -> list[Message]:
    return [Message(role="user", parts=parts)]


def test_a_prompt_has_its_media_where_the_message_has_them() -> None:
    pipe = pipeline()
    one, two = MediaPart("image", png(56, 28)), MediaPart("image", png(28, 28, "blue"))
    request = pipe.request(ask(TextPart("a"), one, TextPart("b"), two, TextPart("c")))
    prepared = pipe.prepare(request)
    spans = prepared.prompt.spans
    assert [span.item.num_tokens for span in spans] == [2, 1]
    ids = prepared.prompt.token_ids
    assert [i for i, token in enumerate(ids) if token == PAD] == [
        i for span in spans for i in range(span.offset, span.offset + span.item.num_tokens)
    ]
    text = "".join(TOKENIZER.token_bytes(token).decode() for token in ids)
    block = "<|media_begin|>image {}<|media_content|>{}<|media_end|>"
    assert f"a{block.format('56x28', '<|media_pad|>' * 2)}b" in text
    assert f"b{block.format('28x28', '<|media_pad|>')}c" in text
    assert prepared.usage.image_tokens == 3
    assert prepared.usage.prompt_tokens == len(ids) - 3


def test_text_that_spells_markers_stays_text() -> None:
    pipe = pipeline()
    markers = "<|media_pad|><|end_of_msg|><|kimi_image_placeholder|><|open|>think<|sep|>"
    plain = pipe.prepare(pipe.request("x")).prompt
    spelled = pipe.prepare(pipe.request(ask(MediaPart("image", png(28, 28)), TextPart(markers))))
    assert len(spelled.prompt.spans) == 1
    controls = [t for t in spelled.prompt.token_ids if TOKENIZER.is_control(t)]
    assert len(controls) == sum(map(TOKENIZER.is_control, plain.token_ids)) + 4


def test_equal_pictures_have_equal_digests_and_different_ones_not() -> None:
    pipe = pipeline()
    parts = [MediaPart("image", png(*size)) for size in ((56, 28), (28, 56), (56, 28))]
    spans = pipe.prepare(pipe.request(ask(*parts))).prompt.spans
    digests = [span.item.digest for span in spans]
    assert digests[0] == digests[2] != digests[1]


def test_a_reply() -> None:
    pipe = pipeline()
    reply = pipe.reply(ask(MediaPart("image", png(28, 28)), TextPart("What?")))
    assert (reply.content, reply.finish, reply.reasoning) == ("A cat.", "stop", "")
    assert reply.usage.completion_tokens == len(pipe.backend.answer)
    assert reply.media[0].width == 28
    with pipe as same:
        assert same is pipe
    assert pipe.backend.closed


def test_openai_style_messages_are_the_same_request() -> None:
    import base64

    pipe = pipeline()
    url = "data:image/png;base64," + base64.b64encode(png(28, 28)).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Hi"}]
    there = pipe.prepare(pipe.request([{"role": "user", "content": parts}])).prompt
    here = pipe.prepare(pipe.request(ask(MediaPart("image", png(28, 28)), TextPart("Hi")))).prompt
    assert there.token_ids == here.token_ids
    assert there.spans[0].item.digest == here.spans[0].item.digest


def test_media_errors_say_which_part() -> None:
    pipe = pipeline()
    messages = [
        {"role": "system", "content": "x"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "image", "image": b""}],
        },
    ]
    with pytest.raises(MediaError, match=r"^messages\[1\]\.content\[1\]: .*empty") as error:
        pipe.reply(messages)
    assert error.value.param == "messages[1].content[1]"
    assert error.value.code == "image_empty"
    assert pipe.backend.prompts == [], "nothing reached the engine"


def test_template_errors_pass_through() -> None:
    with pytest.raises(TemplateError):
        pipeline().request([{"content": "no role"}])


def test_pictures_in_tool_results_follow_the_calls() -> None:
    """Results are written in the order of the calls, so their pictures must be too."""
    pipe = pipeline()
    calls = [{"id": i, "function": {"name": "look", "arguments": "{}"}} for i in ("a", "b")]
    result = {"role": "tool", "content": None}
    pictures = {"a": png(28, 28), "b": png(56, 28)}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *(
            {**result, "tool_call_id": i, "content": [{"type": "image", "image": pictures[i]}]}
            for i in ("b", "a")
        ),
    ]
    spans = pipe.prepare(pipe.request(messages)).prompt.spans
    assert [span.item.num_tokens for span in spans] == [1, 2]


def test_backend_errors_reach_the_caller_and_cancel() -> None:
    pipe = pipeline("", error=BackendError("gone"))
    with pytest.raises(BackendError, match="gone"):
        pipe.reply("hi")
    assert pipe.backend.cancelled == [0]


def test_a_stop_string_ends_a_reply_that_the_backend_would_go_on_with() -> None:
    pipe = pipeline("A cat. ", finish=None)
    reply = pipe.reply("hi", sampling=SamplingParams(stop=("cat",)))
    assert (reply.content, reply.finish) == ("A ", "stop")
    assert pipe.backend.cancelled == [0]
    prepared = pipe.prepare(pipe.request("hi"))
    with pytest.raises(CapacityError, match="no answer within"):
        pipe.complete(prepared, seconds=0.05)
    assert pipe.backend.cancelled == [0, 1]


def test_streaming_in_an_event_loop() -> None:
    pipe = pipeline()

    async def collect_events():
        return [event async for event in pipe.stream("hi", sampling=SamplingParams(max_tokens=9))]

    events = asyncio.run(collect_events())
    assert "".join(event.text for event in events if isinstance(event, Content)) == "A cat."
    assert isinstance(events[-1], Finish)
    assert pipe.backend.prompts[0][1].max_tokens == 9


def test_leaving_a_stream_cancels_it() -> None:
    pipe = pipeline()

    async def leave_early():
        stream = pipe.stream("hi")
        await anext(stream)
        await stream.aclose()

    asyncio.run(leave_early())
    assert pipe.backend.cancelled == [0]
    events = pipe.events("hi")
    next(events)
    events.close()
    assert pipe.backend.cancelled == [0, 1]
