"""The output rules, one by one where the vectors do not reach, and what holds for any text."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3vl.types import (
    Content,
    Finish,
    Reasoning,
    ToolCall,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from k3vl.xtml import Answer, Piece, StreamParser, collect
from tests.timing import cpu_limit

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "output_cases.json"
CASES = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]

SHORT = {
    "[": "<|open|>",
    "]": "<|close|>",
    "|": "<|sep|>",
    "$": "<|end_of_msg|>",
    "#": "<|media_pad|>",
}
"""``[tag|`` opens, ``]tag|`` closes, ``$`` ends the message."""


def pieces(script):
    parts = re.split(r"([\[\]|$#])", script)
    return [Piece(SHORT.get(part, part), part in SHORT) for part in parts if part]


def text_of(script):
    return "".join(piece.text for piece in pieces(script))


def parser(**options):
    numbers = itertools.count()
    return StreamParser(new_call_id=lambda: f"id{next(numbers)}", **options)


def events_of(source, *, finish="stop", **options):
    reader = parser(**options)
    source = pieces(source) if isinstance(source, str) else source
    events = [event for piece in source for event in reader.feed([piece])]
    return events + reader.flush(finish)


def answer(script, **options):
    return collect(events_of(script, **options))


def calls(script, **options):
    return [(c.name, c.arguments) for c in answer(script, **options).tool_calls]


def streamed(events):
    """Arguments text of every call that was begun."""
    texts = {event.index: "" for event in events if isinstance(event, ToolCallBegin)}
    for event in events:
        if isinstance(event, ToolCallArguments):
            texts[event.index] += event.text
    return texts


# ---------------------------------------------------------------------- channels


def test_typed_events_of_a_whole_answer():
    calls_script = '[tools|[call tool="f"|[argument key="a"|x]argument|]call|]tools|'
    events = events_of(f"r]think|[response|c]response|{calls_script}]message|$")
    call = ToolCall(name="f", arguments={"a": "x"}, id="id0")
    assert events == [
        Reasoning("r"),
        Content("c"),
        ToolCallBegin(0, "id0", "f"),
        ToolCallArguments(0, '{"a": "'),
        ToolCallArguments(0, "x"),
        ToolCallArguments(0, '"'),
        ToolCallArguments(0, "}"),
        ToolCallEnd(0, call),
        Finish("tool_calls"),
    ]


@pytest.mark.parametrize(
    ("script", "reasoning", "content"),
    [
        # R3: the first boundary decides
        ("text]response|]message|$", "", "text"),
        ("text]message|$", "", "text"),
        ("te[foo|xt|]message|$", "", "text"),
        ("text]message$", "", "text"),
        ("text$", "text", ""),
        ("text", "text", ""),
        ("[think|text]message|$", "text", ""),
        ("te[think|xt]response|]message|$", "text", ""),
        ("r]think|]response|]message|$", "r", ""),
        ("r]think|a]response|]message|$", "r", "a"),
        ("r[response|a]message|$", "r", "a"),
        # R4
        ("r]think| \n [response|a]response| \n ]message|$", "r", "a"),
        ("r]think| \n x \n [response|a]response|$", "r", " \n x \n a"),
        ("r]think|[response|a]response|]message|tail$", "r", "atail"),
        # R5, R18
        ("a]think|[response|b]response|[think|c]think|[response|d]response|$", "ac", "bd"),
        ("a]think|[response|b[think|c[response|d$", "ac", "bd"),
        # R13
        ("r]think|[response|a[tool", "r", "a"),
        ("r]think|[response|a[", "r", "a"),
        # R15
        ('r]think|[response|a]foo|b]think|c]call|d[argument key="x"|e$', "r", "abcde"),
        ("r]tools|s]call|t]think|$", "rst", ""),
        ("r]think|[response|a#b|c$", "r", "abc"),
        # R16: any control token ends a header
        ("r]think[response|a]response]message$", "r", "a"),
        ("r]think[response#a$", "r", "a"),
        ("r]think$", "r", ""),
        # R17
        ("r] think |[\nresponse\t|a$", "r", "a"),
        # R24
        ("r$x]think|[response|a", "r", ""),
    ],
)
def test_channels(script, reasoning, content):
    found = answer(script)
    assert (found.reasoning, found.content, found.tool_calls) == (reasoning, content, ())
    assert found.finish == "stop"


def test_text_that_was_the_answer_is_sent_again_and_marked():
    assert events_of("an]message|") == [
        Reasoning("an"),
        Content("an", replaces_reasoning=True),
        Finish("stop"),
    ]
    assert events_of("]message|") == [Finish("stop")]


def test_without_thinking_the_response_is_open():
    assert answer("a]response|$", thinking=False).content == "a"
    assert answer("[response|a$", thinking=False).content == "a"
    found = answer("a[think|r]think|b$", thinking=False)
    assert (found.reasoning, found.content) == ("r", "ab")


def test_eos_ends_the_message_too():
    reader = parser()
    reader.feed([Piece("r", control=False), Piece("[EOS]", control=True)])
    assert reader.ended
    assert reader.feed(pieces("more]think|[response|x")) == []
    assert parser().ended is False


# ---------------------------------------------------------------------- calls

TOOLS = "]think|[tools|"
F = '[call tool="f"|'
G = '[call tool="g"|]call|'
END = "]call|"
OPEN_A = '[argument key="a"|'


def arg(key, text, kind="string"):
    return f'[argument key="{key}" type="{kind}"|{text}]argument|'


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        # R6
        (f'[call index="2" tool="f"|junk{arg("n", "1", "number")}junk]call|', [("f", {"n": 1})]),
        ('[call tool="a&amp;quot;&quot;"|]call|', [('a&quot;"', {})]),
        (F + '[json type="object"|{"a": {}}]json|' + END, [("f", {"a": {}})]),
        (F + '[json|{"a": ]json|' + END, [("f", '{"a": ')]),
        (F + "[json|3]json|" + END, [("f", "3")]),
        (F + '[json|{"a": NaN}]json|' + END, [("f", '{"a": NaN}')]),
        (F + "[json|]json|" + END, [("f", "")]),
        # R7
        (F + END + '[call tool="g"|', [("f", {})]),
        (F + G, [("g", {})]),
        (F + "]call", []),
        (F + "]call$", [("f", {})]),
        # R9
        ('[call|]call|[call tool=""|]call|' + F + END, [("f", {})]),
        (F + "[argument|x]argument|" + arg("", "y") + END, [("f", {"": "y"})]),
        (F + OPEN_A + "1]argument|" + END, [("f", {"a": "1"})]),
        # R10
        (
            F + arg("a", "1") + arg("b", "2") + arg("a", "3", "number") + END,
            [("f", {"a": 3, "b": "2"})],
        ),
        # R11
        (
            F + arg("a", " 1e5 ", "number") + arg("b", "7", "integer") + END,
            [("f", {"a": 1e5, "b": 7})],
        ),
        (F + arg("a", "1e999", "number") + END, [("f", {"a": "1e999"})]),
        # R16 in calls
        ('[call tool="f"[argument key="a"|x]argument]call]tools|', [("f", {"a": "x"})]),
        # R25
        (F + END + "]tools|[tools|" + G, [("f", {}), ("g", {})]),
        ("[tools|" + G, [("g", {})]),
        # R26
        (
            F + OPEN_A + "x#[b|y]b|z]c[d|]argument|" + END,
            [("f", {"a": text_of("x#[b|y]b|z]c[d|")})],
        ),
        (F + OPEN_A + "x]call|" + G, [("f", {}), ("g", {})]),
        (F + OPEN_A + "x]tools|[tools|" + G, [("g", {})]),
        (F + OPEN_A + "x]message|", []),
        (F + OPEN_A + "x]json|y]argument|" + END, [("f", {"a": text_of("x]json|y")})]),
        (F + "[json|{}]argument|]json|" + END, [("f", text_of("{}]argument|"))]),
        # channels end a call that is not closed
        (F + "[response|x]response|[tools|" + G, [("g", {})]),
        (F + "]tools|", []),
        # R15: outside of the tools channel nothing is a call
        ("]tools|[response|" + G, []),
        ("]tools|" + G, []),
    ],
)
def test_calls(script, expected):
    assert calls(TOOLS + script) == expected


def test_a_repeated_key_keeps_its_place_in_stream_and_result():
    script = TOOLS + F + arg("a", "1") + arg("b", "2") + arg("a", "3") + END
    events = events_of(script)
    (call,) = collect(events).tool_calls
    assert list(json.loads(streamed(events)[0]).items()) == list(call.arguments.items())


def test_numbers_are_streamed_in_the_models_spelling():
    script = TOOLS + '[call tool="f"|[argument key="a" type="number"|1.50]argument|]call|'
    assert streamed(events_of(script)) == {0: '{"a": 1.50}'}


@pytest.mark.parametrize(
    ("elements", "text"),
    [
        ("", "{}"),
        ('[json|{"a": 1.0}]json|', '{"a": 1.0}'),
        ("[json| { } ]json|", "{}"),
        ('[json|{}]json|[argument key="b"|x]argument|', '{"b": "x"}'),
        ('[argument key="b"|x]argument|[json| {"a": 1} ]json|', '{"b": "x", "a": 1}'),
        ("[json|broken]json|", "broken"),
        ("[json|broken]json|[json|more]json|", "broken"),
        ('[json|broken]json|[argument key="b"|x]argument|', "broken"),
        ('[argument key="b"|x]argument|[json|broken]json|', '{"b": "x"}'),
        ('[argument key="b"|lost', '{"b": "lost'),
        ('[argument key="b" type="number"|1', ""),
    ],
)
def test_streamed_arguments(elements, text):
    end = "" if text in ("", '{"b": "lost') else "]call|"
    assert streamed(events_of(f'{TOOLS}[call tool="f"|{elements}{end}')) == {0: text}


def test_a_broken_off_string_leaves_valid_json_in_the_stream():
    events = events_of(TOOLS + F + arg("a", "x") + '[argument key="b"|lo]call|')
    assert json.loads(streamed(events)[0]) == {"a": "x", "b": "lo"}
    assert collect(events).tool_calls[0].arguments == {"a": "x"}


def test_a_dropped_call_has_no_end_and_leaves_a_gap():
    events = events_of(f'{TOOLS}[call tool="f"|[call tool="g"|]call|')
    assert [e.index for e in events if isinstance(e, ToolCallBegin)] == [0, 1]
    assert [(e.index, e.call.id) for e in events if isinstance(e, ToolCallEnd)] == [(1, "id1")]


def test_tool_choice_none_drops_calls_without_a_trace():
    script = f'{TOOLS}[call tool="f"|[argument key="a"|x]argument|[json|y]json|]call|]tools|$'
    assert events_of(script, tool_choice="none") == [Finish("stop")]


def test_default_call_ids_are_unique():
    source = pieces(TOOLS + '[call tool="f"|]call|' * 50)
    ids = [call.id for call in collect(StreamParser().feed(source)).tool_calls]
    assert len(set(ids)) == 50


# ---------------------------------------------------------------------- finish


@pytest.mark.parametrize(
    ("script", "engine", "expected"),
    [
        ("a$", "stop", "stop"),
        ("a", "length", "length"),
        (f'{TOOLS}[call tool="f"|]call|', "stop", "tool_calls"),
        (f'{TOOLS}[call tool="f"|]call|', "length", "length"),
        (f'{TOOLS}[call tool="f"|', "stop", "stop"),
        (f"{TOOLS}[call|]call|", "stop", "stop"),
    ],
)
def test_finish(script, engine, expected):
    assert answer(script, finish=engine).finish == expected


def test_a_message_is_flushed_once():
    reader = parser()
    reader.flush()
    assert reader.feed(pieces("x")) == []
    with pytest.raises(AssertionError):
        reader.flush()


def test_a_cancelled_answer_has_no_finish():
    assert collect([Reasoning("x")]) == Answer("x", "", (), None)


# ---------------------------------------------------------------------- any text


def joined(events):
    """Events with neighbours of one kind joined."""
    result = []
    for event in events:
        last = result[-1] if result else None
        match last, event:
            case (ToolCallArguments(i, before), ToolCallArguments(j, text)) if i == j:
                result[-1] = ToolCallArguments(i, before + text)
            case (Reasoning(before), Reasoning(text)):
                result[-1] = Reasoning(before + text)
            case (Content(before, False), Content(text, False)):
                result[-1] = Content(before + text)
            case _:
                result.append(event)
    return result


def split(source, sizes):
    """Cut the text pieces; control pieces are one token each."""
    for piece in source:
        if piece.control:
            yield piece
            continue
        text = piece.text
        while text:
            size = next(sizes)
            yield Piece(text[:size], control=False)
            text = text[size:]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_any_split_of_a_vector_gives_the_same_events(case):
    source = [Piece(*piece) for piece in case["pieces"]]
    options = {key: value for key, value in case["options"].items() if key != "engine_finish"}
    finish = case["options"]["engine_finish"]
    whole = joined(events_of(source, finish=finish, **options))
    for size in (1, 2, 3, 7):
        cut = list(split(source, itertools.repeat(size)))
        assert joined(events_of(cut, finish=finish, **options)) == whole
        reader = parser(**options)
        assert joined(reader.feed(cut) + reader.flush(finish)) == whole


WORDS = st.sampled_from(
    ["think", "response", "tools", "message", "call", "argument", "json", "foo", " ", "\n", "text",
     'call tool="f"', 'call tool="g" index="1"', "call tool=", 'argument key="a" type="number"',
     'argument key="b"', "argument", "{", '{"a": 1}', "1", '"', "é", "<|open|>"]
)  # fmt: skip
MARKERS = st.sampled_from([*SHORT.values(), "<|open|>", "<|close|>", "<|sep|>", "[EOS]", "[BOS]"])
SOUP = st.lists(
    st.builds(Piece, WORDS | st.text(max_size=3), st.just(value=False))
    | st.builds(Piece, MARKERS, st.just(value=True)),
    max_size=60,
)


@settings(max_examples=200)
@given(source=SOUP, thinking=st.booleans(), seed=st.integers(0, 2**32))
def test_control_soup_is_read_the_same_however_it_is_split(source, thinking, seed):
    whole = events_of(source, thinking=thinking)
    assert [event for event in whole if isinstance(event, Finish)] == whole[-1:]
    rng = random.Random(seed)
    sizes = iter(lambda: rng.randint(1, 4), 0)
    assert joined(events_of(split(source, sizes), thinking=thinking)) == joined(whole)


@settings(max_examples=200)
@given(source=SOUP)
def test_finished_calls_stream_valid_json(source):
    toolbox = pieces(f'{TOOLS}[call tool="f"|')
    events = events_of([*toolbox, *source, *pieces("|]argument|]json|]call|")])
    texts = streamed(events)
    for event in events:
        if not isinstance(event, ToolCallEnd):
            continue
        arguments, text = event.call.arguments, texts[event.index]
        if isinstance(arguments, dict):
            sent = json.loads(text)
            assert {key: sent[key] for key in arguments} == arguments
        else:
            assert text == arguments or isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "script",
    ["r", "[", "]", "|", "]think|a", "]think| ", f'{TOOLS}[call tool="f"|[argument key="a"|x]b',
     "[x", f'{TOOLS}[call tool="f"|]call|'],
)  # fmt: skip
def test_reading_takes_linear_time(script):
    source = pieces(script) * 10_000
    with cpu_limit(3):
        events_of(source)
