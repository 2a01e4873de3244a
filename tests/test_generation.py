"""One answer in the making: stop strings and counts over the event stream."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from k3vl.errors import BackendError, K3VLError
from k3vl.generation import Answer, Delivery, Generation, Inbox, StopStrings
from k3vl.lm.backend import Token
from k3vl.types import (
    ChatOptions,
    Content,
    Finish,
    Message,
    Request,
    SamplingParams,
    ToolCallEnd,
    Usage,
)
from k3vl.xtml.parser import collect
from k3vl.xtml.tokenizer import load_tokenizer
from tests.test_config import GOLDEN

TOKENIZER = load_tokenizer(GOLDEN / "sglang_tiny")


def ids(text: str) -> list[int]:
    """Token ids of raw model output; control markers become control ids."""
    return TOKENIZER.encode_segment(text, allow_special=True)


def run(text: str, *, finish: str = "stop", thinking: bool = True, stop: tuple[str, ...] = ()):
    request = Request(
        messages=(Message(role="user"),),
        options=ChatOptions(thinking=thinking),
        sampling=SamplingParams(stop=stop),
    )
    generation = Generation(TOKENIZER, request, Usage(prompt_tokens=7))
    events = []
    tokens = ids(text)
    for i, token in enumerate(tokens):
        if generation.done:
            break
        last = i == len(tokens) - 1
        events += generation.feed(Token(id=token, finish=finish if last else None))
    assert generation.done
    assert isinstance(events[-1], Finish)
    assert sum(isinstance(event, Finish) for event in events) == 1
    return events


THINK = "hm<|close|>think<|sep|><|open|>response<|sep|>"
END = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"


def test_reasoning_content_and_counts() -> None:
    events = run(THINK + "Hello." + END)
    answer = collect(events)
    assert (answer.reasoning, answer.content, answer.finish) == ("hm", "Hello.", "stop")
    usage = events[-1].usage
    assert usage.prompt_tokens == 7
    assert usage.completion_tokens == len(ids(THINK + "Hello." + END))
    assert 0 < usage.reasoning_tokens <= len(ids(THINK)) + 1


def test_without_thinking_nothing_is_reasoning() -> None:
    events = run("Hello." + END, thinking=False)
    assert collect(events).content == "Hello."
    assert events[-1].usage.reasoning_tokens == 0


@pytest.mark.parametrize("stop", ["lo w", "H", "!", "o", "world!"])
def test_content_ends_before_a_stop_string(stop: str) -> None:
    whole = "Hello world! Bye."
    events = run(THINK + whole + END, stop=(stop, "never"))
    answer = collect(events)
    assert answer.content == whole[: whole.index(stop)]
    assert answer.finish == "stop"
    assert answer.reasoning == "hm"


def test_stop_strings_do_not_look_at_reasoning() -> None:
    assert collect(run(THINK + "yes" + END, stop=("hm",))).content == "yes"


def test_a_beginning_of_a_stop_string_is_not_lost() -> None:
    assert collect(run(THINK + "a stop" + END, stop=("stop!",))).content == "a stop"
    assert collect(run(THINK + "a sto", finish="length", stop=("stop",))).content == "a sto"


def test_content_before_tool_calls_comes_before_them() -> None:
    call = (
        '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="k" type="number"<|sep|>1<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )
    events = run(THINK + "see x" + call, stop=("xyz",))
    answer = collect(events)
    assert answer.content == "see x"
    assert answer.finish == "tool_calls"
    assert answer.tool_calls[0].arguments == {"k": 1}
    kinds = [type(event) for event in events]
    assert max(i for i, kind in enumerate(kinds) if kind is Content) < kinds.index(ToolCallEnd)


def test_length_is_reported() -> None:
    assert collect(run(THINK + "Hel", finish="length")).finish == "length"


def test_an_unfinished_character_at_the_end_is_replaced() -> None:
    request = Request(messages=(), options=ChatOptions(thinking=False))
    generation = Generation(TOKENIZER, request, Usage())
    first = "é".encode()[0]
    events = generation.feed(Token(id=ids("a")[0]))
    events += generation.feed(Token(id=first, finish="length"))
    assert collect(events).content == "a\ufffd"


def test_a_finish_without_a_token() -> None:
    generation = Generation(TOKENIZER, Request(messages=()), Usage())
    assert isinstance(generation.feed(Token(id=None, finish="length"))[-1], Finish)
    assert generation.done


def test_the_backends_error_is_the_callers() -> None:
    generation = Generation(TOKENIZER, Request(messages=()), Usage())
    with pytest.raises(BackendError, match="gone"):
        generation.feed(BackendError("gone"))
    assert generation.done


def test_any_cut_of_the_text_stops_at_the_same_place() -> None:
    text, stops = "aabaabaac", ("aabaac", "ac")
    want = text[:3]
    for cuts in itertools.product([0, 1], repeat=len(text) - 1):
        stream, out, piece = StopStrings(stops), "", ""
        stopped = False
        for char, cut in zip(text, (*cuts, 1), strict=True):
            piece += char
            if cut and not stopped:
                sure, stopped = stream.feed(piece)
                out, piece = out + sure, ""
        assert stopped
        assert out == want


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("stop", [(), ("lo.",)])
def test_tokens_that_pile_up_change_nothing(size: int, stop: tuple[str, ...]) -> None:
    """However many tokens a wake-up brings, text and counts are those of one by one."""
    call = '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>'
    text = THINK + "Hello. Ünd mehr 🦊" + "<|close|>response<|sep|>" + call
    tokens = [Token(id=i) for i in ids(text)]
    tokens.append(Token(id=TOKENIZER.stop_ids[0], finish="stop"))
    request = Request(messages=(Message(role="user"),), sampling=SamplingParams(stop=stop))
    expected = collect(run(text + "<|end_of_msg|>", stop=stop))

    async def answer() -> list:
        inbox = Inbox(asyncio.get_running_loop())
        generation = Generation(TOKENIZER, request, Usage())

        async def send() -> None:
            for start in range(0, len(tokens), size):
                for token in tokens[start : start + size]:
                    inbox.put(token)
                await asyncio.sleep(0.005)

        sending = asyncio.create_task(send())
        batches = [batch async for batch in Answer(generation, inbox, lambda: None)]
        await sending
        return list(itertools.chain.from_iterable(batches))

    events = asyncio.run(answer())
    found = collect(events)
    assert (found.reasoning, found.content) == (expected.reasoning, expected.content)
    assert [c.name for c in found.tool_calls] == [c.name for c in expected.tool_calls]
    ones = run(text + "<|end_of_msg|>", stop=stop)[-1].usage
    assert events[-1].usage.completion_tokens == ones.completion_tokens
    assert events[-1].usage.reasoning_tokens == ones.reasoning_tokens


def test_a_whole_answer_is_one_delivery() -> None:
    wholes, ones = list[list[Token | K3VLError]](), list[list[Token | K3VLError]]()
    whole, each = Delivery(whole=True, send=wholes.append), Delivery(whole=False, send=ones.append)
    tokens = [Token(id=5), Token(id=6), Token(id=7, finish="length")]
    for token in tokens:
        whole.put(token)
        each.put(token)
    assert wholes == [tokens]
    assert ones == [[token] for token in tokens]
    whole.put(tokens[0])
    assert len(wholes) == 1
    error = BackendError("gone")
    whole.put(error)
    assert wholes[1] == [tokens[0], error]
