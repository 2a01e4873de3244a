"""Answers as token ids -> SGLang's replies, without a server: pieces, calls, cuts, options."""

from __future__ import annotations

import json
from importlib.metadata import version
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.sglang import taught

if TYPE_CHECKING:
    from k3vl.pipeline import Pipeline
    from k3vl.sglang.answers import K3AnswerAdapter

pytestmark = pytest.mark.skipif(
    version("sglang") == "0.5.17", reason="0.5.17 has no interface for it"
)

THOUGHT = "Hm, <b>a</b> cat.<|close|>think<|sep|><|open|>response<|sep|>"
SAID = "A cat. Or <|open|> two."
"""Written with its marker as text: see ``ids``."""
END = "<|close|>response<|sep|>"
STOP = {"type": "stop", "matched": None}
HI = {"role": "user", "content": "hi"}


@pytest.fixture(params=[False, True], ids=["cumulative", "incremental"])
def incremental(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """SGLang's two ways of handing on output ids."""
    from k3vl.sglang import answers

    serving = SimpleNamespace(incremental_streaming_output=request.param)
    monkeypatch.setattr(answers, "get_serving", lambda: serving)
    return request.param


@pytest.fixture
def adapter(pipeline: Pipeline) -> K3AnswerAdapter:
    from k3vl.sglang.answers import K3AnswerAdapter

    hooks = SimpleNamespace(
        history_tool_calls_count=lambda request: 3,
        tool_call_id=lambda item, before: f"{item.name}:{before + item.tool_index}",
    )
    return K3AnswerAdapter(pipeline.tokenizer, pipeline.defaults, hooks)


def request_of(**fields: Any) -> Any:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    return ChatCompletionRequest(**{"model": "k3", "messages": [HI], **fields})


def ids(pipeline: Pipeline, *parts: str) -> list[int]:
    """Token ids; in every second part markers are text, as the model may spell them."""
    return [
        token_id
        for number, part in enumerate(parts)
        for token_id in pipeline.tokenizer.encode_segment(part, number % 2 == 0)
    ]


def streamed(
    adapter: K3AnswerAdapter,
    token_ids: list[int],
    *,
    incremental: bool,
    step: int = 1,
    finish: dict[str, Any] = STOP,
    **fields: Any,
) -> tuple[list[dict[str, Any]], bool]:
    """The deltas of a stream in steps of so many tokens, and whether there were calls."""
    parsers: dict[int, Any] = {}
    has_calls: dict[int, bool] = {}
    deltas = []
    for start in range(0, len(token_ids), step):
        seen = min(start + step, len(token_ids))
        done = seen == len(token_ids)
        meta = {"id": "x", "completion_tokens": seen, "finish_reason": finish if done else None}
        lines = adapter.stream_chat_chunks(
            content={
                "output_ids": token_ids[start:seen] if incremental else token_ids,
                "meta_info": meta,
            },
            index=0,
            request=request_of(**fields),
            created=1,
            parser_dict=parsers,
            has_tool_calls=has_calls,
            choice_logprobs=None,
            finish_reason_type=finish["type"] if done else None,
            usage=None,
        )
        for line in lines:
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            deltas.append(choice["delta"])
    return deltas, has_calls.get(0, False)


def joined(deltas: list[dict[str, Any]], name: str) -> str:
    return "".join(delta.get(name) or "" for delta in deltas)


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_reasoning_and_content(
    adapter: K3AnswerAdapter, pipeline: Pipeline, incremental: bool, step: int
) -> None:
    """A marker in the model's own letters stays text."""
    token_ids = ids(pipeline, THOUGHT, SAID, END)
    deltas, has_calls = streamed(adapter, token_ids, incremental=incremental, step=step)
    assert joined(deltas, "reasoning_content") == "Hm, <b>a</b> cat."
    assert joined(deltas, "content") == SAID
    assert not has_calls
    assert adapter.parse_chat_response(
        request=request_of(), output_ids=token_ids, finish_reason=STOP
    ) == ("Hm, <b>a</b> cat.", SAID, None, STOP)


def test_arguments_come_piece_by_piece(
    adapter: K3AnswerAdapter, pipeline: Pipeline, incremental: bool
) -> None:
    deltas, has_calls = streamed(
        adapter,
        ids(pipeline, taught.ANSWER),
        incremental=incremental,
        chat_template_kwargs={"thinking": False},
    )
    assert has_calls
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls") or ()]
    assert pieces[0]["id"] == "look:3"
    assert pieces[0]["function"]["name"] == "look"
    assert {piece["index"] for piece in pieces} == {0}
    assert not any(piece["id"] or piece["function"]["name"] for piece in pieces[1:])
    arguments = [piece["function"]["arguments"] for piece in pieces]
    assert json.loads("".join(arguments)) == taught.ARGUMENTS
    assert len([text for text in arguments if text]) >= len(taught.ARGUMENTS["at"])


def test_what_sglang_s_own_parser_does(adapter: K3AnswerAdapter, pipeline: Pipeline) -> None:
    """The rows of the table in docs/sglang.md: it has text, so a spelled call is a call to it."""
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.kimik3_detector import KimiK3Detector

    said = taught.ANSWER
    tools = [Tool(**taught.TOOL)]
    assert KimiK3Detector().detect_and_parse(said, tools).calls
    detector = KimiK3Detector()
    steps = [detector.parse_streaming_increment(letter, tools) for letter in said]
    calls = [call for step in steps for call in step.calls if call.parameters]
    assert len(calls) == 1, "arguments in one piece"
    spelled = pipeline.tokenizer.encode_segment(said, False)
    _, content, ours, _ = adapter.parse_chat_response(
        request=request_of(chat_template_kwargs={"thinking": False}),
        output_ids=spelled,
        finish_reason=STOP,
    )
    assert content == said
    assert ours is None


def test_whole_calls(adapter: K3AnswerAdapter, pipeline: Pipeline) -> None:
    request = request_of(chat_template_kwargs={"thinking": False})
    second = taught.ANSWER.replace('index="1"', 'index="2"').partition("<|sep|><|open|>tools")[2]
    first, _, tail = taught.ANSWER.rpartition("<|close|>tools")
    both = first + second.partition("<|sep|>")[2].rpartition("<|close|>tools")[0]
    token_ids = ids(pipeline, f"{both}<|close|>tools{tail}")
    _, content, calls, finish = adapter.parse_chat_response(
        request=request, output_ids=token_ids, finish_reason=STOP
    )
    assert content == ""
    assert calls is not None
    assert [call.id for call in calls] == ["look:3", "look:4"]
    assert [json.loads(call.function.arguments) for call in calls] == [taught.ARGUMENTS] * 2
    assert finish["type"] == "tool_calls"


def test_a_call_that_is_cut_off_is_none(
    adapter: K3AnswerAdapter, pipeline: Pipeline, incremental: bool
) -> None:
    length = {"type": "length", "length": 90}
    token_ids = ids(pipeline, taught.ANSWER)[:90]
    fields = {"chat_template_kwargs": {"thinking": False}}
    assert adapter.parse_chat_response(
        request=request_of(**fields), output_ids=token_ids, finish_reason=length
    )[2:] == (None, length)
    _, has_calls = streamed(adapter, token_ids, incremental=incremental, finish=length, **fields)
    assert not has_calls


def test_calls_that_are_not_wanted_are_dropped(
    adapter: K3AnswerAdapter, pipeline: Pipeline
) -> None:
    request = request_of(
        tools=[taught.TOOL], tool_choice="none", chat_template_kwargs={"thinking": False}
    )
    answer = adapter.parse_chat_response(
        request=request, output_ids=ids(pipeline, taught.ANSWER), finish_reason=STOP
    )
    assert answer == (None, "", None, STOP)


def test_reasoning_may_be_part_of_the_content_or_held_back(
    adapter: K3AnswerAdapter, pipeline: Pipeline, incremental: bool
) -> None:
    token_ids = ids(pipeline, THOUGHT, SAID, END)
    together, _ = streamed(adapter, token_ids, incremental=incremental, separate_reasoning=False)
    assert joined(together, "content") == "Hm, <b>a</b> cat." + SAID
    assert joined(together, "reasoning_content") == ""
    held, _ = streamed(adapter, token_ids, incremental=incremental, stream_reasoning=False)
    assert [d["reasoning_content"] for d in held if d.get("reasoning_content")] == [
        "Hm, <b>a</b> cat."
    ]
    cut = {"type": "length", "length": 4}
    early, _ = streamed(
        adapter, token_ids[:4], incremental=incremental, finish=cut, stream_reasoning=False
    )
    assert joined(early, "reasoning_content") == "Hm, "


def test_stop_strings_are_no_part_of_the_content(
    adapter: K3AnswerAdapter, pipeline: Pipeline, incremental: bool
) -> None:
    token_ids = ids(pipeline, THOUGHT, "A cat. STOP")
    met = {"type": "stop", "matched": "STOP"}
    deltas, _ = streamed(adapter, token_ids, incremental=incremental, finish=met, stop=["STOP"])
    assert joined(deltas, "content") == "A cat. "
    kept = adapter.parse_chat_response(
        request=request_of(stop="STOP", no_stop_trim=True),
        output_ids=token_ids,
        finish_reason=met,
    )
    assert kept[1] == "A cat. STOP"


def test_a_message_that_is_continued_is_content(
    adapter: K3AnswerAdapter, pipeline: Pipeline
) -> None:
    request = request_of(
        messages=[HI, {"role": "assistant", "content": "I see"}],
        continue_final_message=True,
        add_generation_prompt=False,
    )
    answer = adapter.parse_chat_response(
        request=request, output_ids=ids(pipeline, " a cat." + END), finish_reason=STOP
    )
    assert answer[:2] == (None, " a cat.")


def test_responses_are_read_alike(
    adapter: K3AnswerAdapter, pipeline: Pipeline, incremental: bool
) -> None:
    settings: dict[str, Any] = {"request": None, "separate_reasoning": True}
    token_ids = ids(pipeline, taught.ANSWER)
    _, content, calls = adapter.parse_responses_output(
        output_ids=token_ids,
        finish_reason=STOP,
        require_reasoning=False,
        parse_tool_calls=True,
        **settings,
    )
    assert content == ""
    assert [(call.name, json.loads(call.parameters)) for call in calls] == [
        ("look", taught.ARGUMENTS)
    ]
    thought = ids(pipeline, THOUGHT, SAID, END)
    stream = adapter.new_responses_stream(
        require_reasoning=True, parse_tool_calls=False, **settings
    )
    steps = [
        stream.step(
            {
                "output_ids": thought[n - 1 : n] if incremental else thought,
                "meta_info": {"completion_tokens": n},
            },
            STOP if n == len(thought) else None,
        )
        for n in range(1, len(thought) + 1)
    ]
    assert "".join(reasoning for reasoning, _, _ in steps) == "Hm, <b>a</b> cat."
    assert "".join(content for _, content, _ in steps) == SAID
    assert not any(calls for _, _, calls in steps)


def test_other_parsers_are_left_alone(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks SGLang for parsers of its own, or for none, gets those."""
    from sglang.srt.entrypoints.openai import chat_encoding_adapters

    from k3vl.sglang.chat import K3ChatAdapter
    from k3vl.sglang.releases import SPEC, Release0523

    monkeypatch.setattr(chat_encoding_adapters, "_BUILDERS", {})
    adapter = K3ChatAdapter(pipeline.tokenizer, pipeline.defaults, takes_clips=True)
    Release0523().install(adapter)
    build = chat_encoding_adapters._BUILDERS[SPEC]["builtin"]
    for parsers, ours in (
        (("kimi_k3", "kimi_k3"), True),
        (("kimi_k3", None), False),
        ((None, None), False),
        (("kimi_k3", "kimi_k2"), False),
    ):
        context = SimpleNamespace(
            reasoning_parser=parsers[0], tool_call_parser=parsers[1], chat_hooks=None
        )
        assert (build(context).output is not None) is ours
