"""Constrained answers: exactly the permitted messages are possible, whatever the model wants."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from k3vl.config import checkpoint_path
from k3vl.constrain import ConstraintCompiler
from k3vl.errors import RequestError
from k3vl.generation import Generation
from k3vl.lm.backend import Token
from k3vl.lm.sampler import Sampler, choose
from k3vl.types import (
    ChatOptions,
    Message,
    Request,
    SamplingParams,
    TextPart,
    ToolCall,
    Usage,
)
from k3vl.xtml.parser import collect
from k3vl.xtml.render import render
from k3vl.xtml.tokenizer import encode, load_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "dark blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
        "label": {"type": "string", "maxLength": 12},
    },
    "required": ["colour", "count", "label"],
    "additionalProperties": False,
}
LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
ANY_OF = {
    "type": "function",
    "function": {
        "name": "any-of",
        "parameters": {"anyOf": [{**SCHEMA, "required": ["colour"]}, {"type": "object"}]},
    },
}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(checkpoint_path("demo"))


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return ConstraintCompiler(tokenizer)


def request(text: str = "x", *, prefix: str | None = None, tools=(), **options) -> Request:
    messages = (Message(role="user", parts=(TextPart(text),)),)
    if prefix is not None:
        messages += (Message(role="assistant", parts=(TextPart(prefix),), partial=True),)
    return Request(messages=messages, tools=tuple(tools), options=ChatOptions(**options))


def babble(compiler, tokenizer, asked: Request, seed: int, *, eager: float = 6.0):
    """What a model with random preferences writes under the constraint; ``eager`` to end things."""
    generator = torch.Generator().manual_seed(seed)
    bias = torch.zeros(tokenizer.vocab_size)
    bias[list(tokenizer.special_ids.values())] = eager
    constraint = compiler.compile(asked)
    assert constraint is not None
    sampler = Sampler(SamplingParams(temperature=1.0, seed=seed, logit_mask=constraint.mask()))
    generation = Generation(tokenizer, asked, Usage())
    events = []
    for _ in range(400):
        logits = torch.randn(1, tokenizer.vocab_size, generator=generator) + bias
        (token_id,) = choose(logits, [sampler])
        ended = token_id in tokenizer.stop_ids
        events += generation.feed(Token(id=token_id, finish="stop" if ended else None))
        if generation.done:
            return collect(events)
    return None


def format_of(schema) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_schema_holds_against_noise(compiler, tokenizer, thinking, seed) -> None:
    asked = request(thinking=thinking, response_format=format_of(SCHEMA))
    answer = babble(compiler, tokenizer, asked, seed)
    assert answer is not None
    value = json.loads(answer.content)
    assert set(value) == {"colour", "count", "label"}
    assert value["colour"] in ("red", "dark blue")
    assert 0 <= value["count"] <= 9
    assert "\n" not in answer.content
    assert answer.content.startswith('{"')


@pytest.mark.parametrize("tool", [LOOK, ANY_OF], ids=["elements", "json"])
@pytest.mark.parametrize("thinking", [False, True])
def test_a_named_tool_is_called_once(compiler, tokenizer, tool, thinking) -> None:
    name = tool["function"]["name"]
    choice = {"type": "function", "function": {"name": name}}
    asked = request(thinking=thinking, tools=[LOOK, ANY_OF], tool_choice=choice)
    answers = [babble(compiler, tokenizer, asked, seed) for seed in range(6)]
    ended = [answer for answer in answers if answer is not None]
    assert ended
    for answer in ended:
        assert answer.finish == "tool_calls"
        assert answer.content == ""
        (call,) = answer.tool_calls
        assert call.name == name
        if tool is LOOK:
            assert call.arguments["colour"] in ("red", "dark blue")
            assert isinstance(call.arguments["count"], int)
            assert len(call.arguments["label"]) <= 12


def test_required_calls_one_of_the_tools(compiler, tokenizer) -> None:
    asked = request(tools=[LOOK], tool_choice="required", parallel_tool_calls=False)
    answer = babble(compiler, tokenizer, asked, 0)
    assert answer is not None
    assert [call.name for call in answer.tool_calls] == ["look"]


def test_tools_on_the_way_count_for_required(compiler, tokenizer) -> None:
    asked = request(tool_choice="required", parallel_tool_calls=False)
    declaring = Message(role="system", tools=(LOOK,))
    asked = replace(asked, messages=(declaring, *asked.messages))
    answer = babble(compiler, tokenizer, asked, 1)
    assert answer is not None
    assert [call.name for call in answer.tool_calls] == ["look"]


def test_a_json_answer_may_be_a_call_instead(compiler, tokenizer) -> None:
    asked = request(thinking=False, tools=[LOOK], response_format=format_of(SCHEMA))
    answers = [babble(compiler, tokenizer, asked, seed, eager=0.0) for seed in range(12)]
    ended = [answer for answer in answers if answer is not None]
    assert {bool(answer.tool_calls) for answer in ended} == {True, False}
    assert all(answer.content == "" or json.loads(answer.content) for answer in ended)


def test_a_prefix_is_part_of_the_answer(compiler, tokenizer) -> None:
    asked = request(prefix='{"colour":"re', response_format=format_of(SCHEMA))
    answer = babble(compiler, tokenizer, asked, 0)
    assert answer is not None
    assert json.loads('{"colour":"re' + answer.content)["colour"] == "red"
    with pytest.raises(RequestError, match="cannot begin") as caught:
        compiler.compile(request(prefix="Well, ", response_format=format_of(SCHEMA)))
    assert caught.value.param == "messages[1].content"


@pytest.mark.parametrize(
    "schema", [{"type": "objct"}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "("}]
)
def test_a_bad_schema_is_refused(compiler, schema) -> None:
    with pytest.raises(RequestError) as caught:
        compiler.compile(request(response_format=format_of(schema)))
    assert caught.value.param == "response_format"


def test_names_and_keys_are_data(compiler, tokenizer) -> None:
    """Quotes, markers and grammar signs in names do not escape into the grammar."""
    key = 'a"b\\ <|close|> | /x/'
    schema = {"type": "object", "properties": {key: {"enum": ['"; start: /./']}}, "required": [key]}
    tool = {"type": "function", "function": {"name": "t", "parameters": schema}}
    asked = request(tools=[tool], tool_choice="required", parallel_tool_calls=False)
    answer = babble(compiler, tokenizer, asked, 0)
    assert answer is not None
    assert answer.tool_calls[0].arguments == {key: '"; start: /./'}


def test_nothing_asked_is_nothing_enforced(compiler) -> None:
    assert compiler.compile(request(tools=[LOOK], tool_choice="none")) is None


OPENED = "A <b>word</b>.<|close|>response<|sep|><|open|>tools<|sep|>"
CLOSED = "<|close|>tools<|sep|>"


def watched(compiler, tokenizer, tools=(LOOK, ANY_OF), **options):
    constraint = compiler.compile(request(tools=tools, thinking=False, **options))
    assert constraint is not None
    mask = constraint.mask()

    def accept(text: str) -> list[bool]:
        masked = []
        for token_id in tokenizer.encode_segment(text, True):
            masked.append(mask.allowed() is not None)
            mask.accept(token_id)
        return [*masked, mask.allowed() is not None]

    return mask, accept


@pytest.mark.parametrize("choice", ["auto", None])
def test_free_text_is_not_masked_until_the_model_calls(compiler, tokenizer, choice) -> None:
    _, accept = watched(compiler, tokenizer, tool_choice=choice)
    *before, opened = accept(OPENED)
    assert not any(before)
    assert opened
    _, accept = watched(compiler, tokenizer, tool_choice=choice)
    assert not any(accept("The tools <|open|>think<|sep|>tools<|close|>tools<|sep|> and tools."))


@pytest.mark.parametrize("seed", range(3))
def test_calls_of_its_own_follow_the_schema(compiler, tokenizer, seed: int) -> None:
    asked = request(tools=[LOOK], thinking=False, tool_choice="auto")
    mask, accept = watched(compiler, tokenizer, tools=[LOOK])
    accept(OPENED)
    generator = torch.Generator().manual_seed(seed)
    bias = torch.zeros(tokenizer.vocab_size)
    bias[list(tokenizer.special_ids.values())] = 9.0
    sampler = Sampler(SamplingParams(temperature=1.0, seed=seed, logit_mask=mask))
    written = tokenizer.encode_segment(OPENED, True)
    for _ in range(400):
        if mask.allowed() is None:
            break
        logits = torch.randn(1, tokenizer.vocab_size, generator=generator) + bias
        written += choose(logits, [sampler])
    assert mask.allowed() is None, "free again behind the channel"
    generation = Generation(tokenizer, asked, Usage())
    events = [event for token_id in written for event in generation.feed(Token(id=token_id))]
    events += generation.feed(Token(id=tokenizer.stop_ids[0], finish="stop"))
    answer = collect(events)
    assert answer.content == "A <b>word</b>."
    assert answer.tool_calls
    for call in answer.tool_calls:
        assert call.name == "look"
        assert set(call.arguments) == {"colour", "count", "label"}
        assert call.arguments["colour"] in ("red", "dark blue")


TAG = {
    "type": "function",
    "function": {
        "name": "tag",
        "parameters": {
            "type": "object",
            "properties": {
                "tags": {"type": "array", "items": {"type": "string"}},
                "counts": {"type": "object"},
            },
            "required": ["tags", "counts"],
        },
    },
}


def refused(mask, ids) -> list[int]:
    """Those of ``ids`` that the mask has no room for, one after the other."""
    out = []
    for token_id in ids:
        bits = mask.allowed()
        if bits is not None and not bits[token_id // 32] >> (token_id % 32) & 1:
            out.append(token_id)
        mask.accept(token_id)
    return out


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_as_the_template_writes_them_are_permitted(compiler, tokenizer, choice) -> None:
    """Lists and objects have spaces behind their commas and colons in K3's own arguments."""
    asked = request(tools=[TAG], thinking=False)
    arguments = {"tags": ["a red fox", "owl"], "counts": {"owl": 1, "fox": [2, 3]}}
    call = ToolCall(id="1", name="tag", arguments=arguments)
    said = Message(role="assistant", parts=(), tool_calls=(call,))
    prompt = encode(render(asked.messages, tools=[TAG], options=asked.options), tokenizer)
    options = ChatOptions(thinking=False, add_generation_prompt=False)
    whole = encode(render([*asked.messages, said], tools=[TAG], options=options), tokenizer)
    assert whole[: len(prompt)] == prompt
    constraint = compiler.compile(request(tools=[TAG], thinking=False, tool_choice=choice))
    assert refused(constraint.mask(), whole[len(prompt) :]) == []


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_json_may_have_spaces_behind_its_signs(compiler, tokenizer, kind, separators) -> None:
    value = {"colour": "red", "count": 2, "label": "a, b: c"}
    wanted = kind if kind == "json_object" else format_of(SCHEMA)
    mask = compiler.compile(request(thinking=False, response_format=wanted)).mask()
    text = json.dumps(value, separators=separators)
    assert refused(mask, tokenizer.encode_segment(text, False)) == []


def test_one_call_where_only_one_may_be_made(compiler, tokenizer) -> None:
    call = '<|open|>call tool="any-of" index="1"<|sep|><|open|>json type="object"<|sep|>{}'
    end = "<|close|>json<|sep|><|close|>call<|sep|>"
    again = tokenizer.special_ids["<|open|>"]
    for parallel in (True, False):
        mask, accept = watched(compiler, tokenizer, parallel_tool_calls=parallel)
        accept(OPENED + call + end)
        bits = mask.allowed()
        assert bool(bits[again // 32] >> (again % 32) & 1) == parallel


def test_a_schema_that_cannot_be_enforced_leaves_calls_free(compiler) -> None:
    odd = {"type": "object", "properties": {"x": {"type": "nonsense"}}}
    tool = {"type": "function", "function": {"name": "odd", "parameters": odd}}
    assert compiler.compile(request(tools=[tool], tool_choice="auto")) is None
    with pytest.raises(RequestError):
        compiler.compile(request(tools=[tool], tool_choice="required"))
    assert compiler.compile(request(response_format={"type": "text"})) is None
