"""A transcript parses back into what renders to it, or says where it does not."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3vl.errors import TemplateError
from k3vl.types import (
    ChatOptions,
    MediaGroup,
    MediaLayout,
    MediaPart,
    Message,
    TextPart,
    ToolCall,
)
from k3vl.xtml import ImagePrompts, Segment, encode, parse_ids, parse_segments, render
from tests.timing import cpu_limit

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "xtml_cases.json"
CASES = [
    case
    for case in json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
    if "expected" in case and case["name"] != "placeholder_in_reasoning_with_prompts"
]

BOTH = pytest.mark.parametrize("name", ["k3", "tiny"])
SHARED = settings(
    max_examples=80,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def rendered(transcript):
    return render(
        transcript.messages,
        tools=transcript.tools,
        options=transcript.options,
        media=transcript.media,
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_segments_come_back(case):
    segments = [Segment(**segment) for segment in case["expected"]["segments"]]
    assert rendered(parse_segments(segments)) == segments


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
@BOTH
def test_golden_ids_come_back(case, name, request):
    tokenizer = request.getfixturevalue(name)
    ids = encode([Segment(**segment) for segment in case["expected"]["segments"]], tokenizer)
    assert encode(rendered(parse_ids(ids, tokenizer)), tokenizer) == ids


def test_media_inside_reasoning_has_no_place_in_a_message():
    prompts = ImagePrompts(("<|media_begin|>image 1x1<|media_content|><|media_pad|><|media_end|>",))
    message = Message(role="assistant", reasoning="saw <|kimi_image_placeholder|>")
    with pytest.raises(TemplateError, match=r"expected <\|close\|> \(character \d+, message 0\)"):
        parse_segments(render([message], media=prompts))


def test_everything_a_transcript_says_is_recovered():
    tool = {"type": "function", "function": {"name": "f"}}
    later = {"type": "function", "function": {"name": "g"}}
    messages = (
        Message(role="system", parts=(TextPart("Be brief."),), name="policy"),
        Message(role="system", tools=(later,)),
        Message(
            role="user",
            parts=(TextPart("a"), MediaPart("image", ""), TextPart("b"), MediaPart("video", "")),
        ),
        Message(
            role="assistant",
            parts=(TextPart("c"),),
            reasoning="why",
            tool_calls=(
                ToolCall(name='f"&', arguments={"s": "1", "n": 1.0, "o": {"k": [None, True]}}),
                ToolCall(name="g", arguments="{broken"),
            ),
        ),
        Message(role="tool", parts=(TextPart("r"),), tool_name='f"&'),
    )
    options = ChatOptions(
        thinking_effort="low",
        tool_choice="required",
        response_format={"type": "json_schema", "json_schema": {"schema": {"a": 1}}},
    )
    media = (
        MediaLayout("image", 3, 4, (MediaGroup(2),)),
        MediaLayout("video", 0, 0, (MediaGroup(1, "00:00:00.000"), MediaGroup(1, "00:00:00.500"))),
    )
    segments = render(messages, tools=[tool], options=options, media=media)
    found = parse_segments(segments)
    assert found.messages == messages
    assert found.tools == (tool,)
    assert found.options == options
    assert found.media == media


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("stub", [True, False])
def test_options_are_recovered_from_the_frame(thinking, stub):
    options = ChatOptions(thinking=thinking, add_generation_prompt=stub, response_format=None)
    message = Message(role="assistant", parts=(TextPart("a"),))
    assert parse_segments(render([message], options=options)).options == options


def test_a_message_to_be_continued_is_recovered():
    message = Message(
        role="assistant", parts=(TextPart("The"),), reasoning="r", name="b", partial=True
    )
    assert parse_segments(render([message])).messages == (message,)


def test_clips_side_by_side_are_told_apart_by_their_clocks():
    clip = MediaLayout(
        "video", 0, 0, (MediaGroup(1, "00:00:00.000"), MediaGroup(1, "00:00:02.000"))
    )
    message = Message(role="user", parts=(MediaPart("video", ""),) * 2)
    assert parse_segments(render([message], media=(clip, clip))).media == (clip, clip)


@BOTH
def test_digits_in_front_of_a_clip_stay_text(name, request):
    tokenizer = request.getfixturevalue(name)
    clip = MediaLayout("video", 0, 0, (MediaGroup(1, "00:00:00.000"),))
    message = Message(role="user", parts=(TextPart("at 12:"), MediaPart("video", "")))
    ids = encode(render([message], media=(clip,)), tokenizer)
    assert parse_ids(ids, tokenizer).messages == (message,)


def test_a_clip_without_a_clock_is_a_clip_for_itself():
    clip = MediaLayout("video", 0, 0, (MediaGroup(1),))
    message = Message(role="user", parts=(TextPart("x"), *(MediaPart("video", ""),) * 2))
    found = parse_segments(render([message], media=(clip, clip)))
    assert (found.messages, found.media) == ((message,), (clip, clip))


@BOTH
def test_a_time_in_the_text_is_text(name, request):
    tokenizer = request.getfixturevalue(name)
    clip = MediaLayout("video", 0, 0, (MediaGroup(1),))
    for text in ("at 12:30", "x1234:56", "00:00:00.0000"):
        message = Message(role="user", parts=(TextPart(text), MediaPart("video", "")))
        ids = encode(render([message], media=(clip,)), tokenizer)
        assert encode(rendered(parse_ids(ids, tokenizer)), tokenizer) == ids


def test_parts_whose_joint_shows_in_the_ids_come_apart(k3):
    message = Message(role="user", parts=(TextPart('say "he'), TextPart("llo wor"), TextPart("ld")))
    ids = encode(render([message]), k3)
    (found,) = parse_ids(ids, k3).messages
    assert "".join(part.text for part in found.parts) == 'say "hello world'
    assert len(found.parts) > 1


# ---------------------------------------------------------------------- any conversation

TEXT = st.text(max_size=12) | st.sampled_from(
    [
        "<|open|>",
        "<|close|>message<|sep|>",
        "[EOS]",
        "<|kimi_image_placeholder|>",
        "00:00:00.000",
        "=",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=3)
TOOLS = st.lists(OBJECT, min_size=1, max_size=2).map(tuple)
NAME = st.none() | TEXT.filter(bool)
STAMPS = st.lists(st.integers(0, 90_000), min_size=1, max_size=3, unique=True).map(sorted)


def stamp(ms):
    return f"00:{ms // 60000:02}:{ms // 1000 % 60:02}.{ms % 1000:03}"


IMAGE = st.builds(
    lambda w, h, n: MediaLayout("image", w, h, (MediaGroup(n),)),
    st.integers(1, 9999), st.integers(1, 9999), st.integers(1, 5),
)  # fmt: skip
CLIP = st.builds(
    lambda times: MediaLayout("video", 0, 0, tuple(MediaGroup(2, stamp(t)) for t in times)), STAMPS
)
PARTS = st.lists(TEXT.filter(bool).map(TextPart) | IMAGE | CLIP, max_size=4)
CALL = st.builds(
    lambda name, arguments: ToolCall(name=name, arguments=arguments), TEXT, OBJECT | TEXT
)


@st.composite
def conversations(draw):
    """Arguments of ``render``, with layouts standing in the parts that they belong to."""
    messages = []
    for role in draw(
        st.lists(st.sampled_from(["system", "user", "assistant", "tool", "dynamic"]), max_size=5)
    ):
        if role == "dynamic":
            messages.append(Message(role="system", tools=draw(TOOLS)))
            continue
        message = Message(role=role, parts=tuple(draw(PARTS)))
        if role == "tool":
            message = dataclasses.replace(message, tool_name=draw(TEXT))
        else:
            message = dataclasses.replace(message, name=draw(NAME))
        if role == "assistant":
            calls = tuple(draw(st.lists(CALL, max_size=2)))
            message = dataclasses.replace(message, reasoning=draw(NAME), tool_calls=calls)
        messages.append(message)
    last = messages[-1] if messages else Message(role="user")
    # With nothing in it, a message to be continued is the generation stub.
    if last.role == "assistant" and last.parts and not last.tool_calls:
        messages[-1] = dataclasses.replace(messages[-1], partial=draw(st.booleans()))
    media = [p for m in messages for p in m.parts if isinstance(p, MediaLayout)]
    messages = [
        dataclasses.replace(
            m,
            parts=tuple(
                MediaPart(p.kind, "") if isinstance(p, MediaLayout) else p for p in m.parts
            ),
        )
        for m in messages
    ]
    options = ChatOptions(
        thinking=draw(st.booleans()),
        thinking_effort=draw(st.sampled_from([None, "low", "high", "max"])),
        tool_choice=draw(st.sampled_from([None, "auto", "none", "required"])),
        response_format=draw(st.sampled_from([None, "json_object", "json_schema"])),
        response_schema=draw(JSON),
        add_generation_prompt=draw(st.booleans()),
    )
    return {
        "messages": messages,
        "tools": draw(st.just(()) | TOOLS),
        "options": options,
        "media": media,
    }


@SHARED
@given(arguments=conversations())
def test_any_conversation_comes_back_from_its_segments(arguments):
    segments = render(**arguments)
    found = parse_segments(segments)
    assert rendered(found) == segments
    assert [m.role for m in found.messages] == [m.role for m in arguments["messages"]]


@BOTH
@SHARED
@given(arguments=conversations())
def test_any_conversation_comes_back_from_its_ids(name, request, arguments):
    tokenizer = request.getfixturevalue(name)
    ids = encode(render(**arguments), tokenizer)
    found = parse_ids(ids, tokenizer)
    assert encode(rendered(found), tokenizer) == ids
    assert [m.role for m in found.messages] == [m.role for m in arguments["messages"]]


# ---------------------------------------------------------------------- malformed

SHORT = {"[": "<|open|>", "]": "<|close|>", "|": "<|sep|>", "$": "<|end_of_msg|>"}
CALLED = '[message role="assistant"|[think|]think|[response|]response|[tools|'


CALL_F = '[call tool="f" index="1"|'
UGLY = '[argument key="a" type="number"|1.50]argument|'
MIXED = '[message role="assistant"|[response|]response|]message|$[message role="assistant"|[think|'
TYPED = '[message role="system" type='


def trusted(script):
    parts = re.split(r"([\[\]|$])", script)
    return [Segment(SHORT.get(part, part), part in SHORT) for part in parts if part]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("text", r"expected <\|open\|> \(character 0, message 0\)"),
        ('[message role="user"|hi', "expected <|close|>"),
        ('[message role="user"|hi]message|', "expected <|end_of_msg|>"),
        ('[message role="user"|hi]massage|$', "closing 'message', found 'massage'"),
        ('[message role="robot"|]message|$', "unknown role 'robot'"),
        ("[message|]message|$", "unknown role ''"),
        ("[think|", "opening 'message', found 'think'"),
        (TYPED + '"weather"|]message|$', "unknown internal message 'weather'"),
        (TYPED + '"tool-choice"|maybe]message|$', "tool-choice message of unk"),
        (TYPED + '"tool-declare"|x]message|$', "tool-declare message of unk"),
        (TYPED + '"response-format"|x]message|$', "response-format message of unk"),
        (TYPED + '"thinking-effort"|x]message|$', "thinking-effort message of unk"),
        ('[message role="tool" tool="f" index="2"|r]message|$', "tool result 1 has index '2'"),
        ('[message role="tool" index="1"|r]message|$', "no tool name"),
        (CALLED + '[call tool="f" index="7"|', "call 1 has index '7' and a tool name"),
        (CALLED + CALL_F + '[argument key="a"|1]argument|', "lacks its key or its type"),
        (CALLED + CALL_F + '[argument key="a" type="number"|x]argument|', "expected JSON"),
        ('[message role="assistant"|[think|[message role="user"|', "expected <|close|>"),
        (MIXED, "some assistant messages have a think channel"),
        ('[message role="user"  name="x"|]message|$', "segment 1 of 7 is not what the templ"),
        (CALLED + CALL_F + UGLY + "]call|]tools|]message|$", "is not what the template writes"),
    ],
)  # fmt: skip
def test_malformed_transcripts_say_where(script, message):
    message = message if "\\" in message else message.replace("|", r"\|")
    with pytest.raises(TemplateError, match=message) as caught:
        parse_segments(trusted(script))
    assert caught.value.code in ("malformed_transcript", "not_canonical")


@pytest.mark.parametrize(
    "block",
    [
        "<|media_begin|>audio<|media_content|><|media_pad|><|media_end|>",
        "<|media_begin|>image 1x1<|media_pad|><|media_end|>",
        "<|media_begin|>image 1x1<|media_content|><|media_pad|>",
        "<|media_begin|>image 01x1<|media_content|><|media_pad|><|media_end|>",
    ],
)
def test_malformed_media_blocks_are_errors(block, tiny):
    user = render([Message(role="user", parts=(TextPart("@"),))])
    segments = [Segment(block, allow_special=True) if s.text == "@" else s for s in user]
    with pytest.raises(TemplateError):
        parse_segments(segments)
    with pytest.raises(TemplateError):
        parse_ids(encode(segments, tiny), tiny)


def test_text_behind_the_stub_is_an_error():
    segments = render([Message(role="user")])
    with pytest.raises(TemplateError):
        parse_segments([*segments, Segment("x", allow_special=False)])


def test_messages_out_of_place_are_errors():
    frame = ChatOptions(tool_choice="none", add_generation_prompt=False)
    late = render([], options=frame)
    early = render([], options=ChatOptions(thinking_effort="low", add_generation_prompt=False))
    tools = render([], tools=[{}], options=ChatOptions(add_generation_prompt=False))
    user = render([Message(role="user")], options=ChatOptions(add_generation_prompt=False))
    for wrong in (
        late + user,
        user + early,
        user + tools,
        early + tools,
        late + tools,
        late + late,
    ):
        with pytest.raises(TemplateError):
            parse_segments(wrong)


SNIPPETS = st.sampled_from(
    [
        "<|open|>",
        "<|close|>",
        "<|sep|>",
        "<|end_of_msg|>",
        "<|media_begin|>",
        "<|media_content|>",
        "<|media_pad|>",
        "<|media_end|>",
        "<|close|>message<|sep|><|end_of_msg|>",
        "<|bos|>",
        '<|open|>message role="user"<|sep|>',
        '<|open|>message role="assistant"<|sep|>',
        '<|open|>message role="system" type="tool-declare"<|sep|>',
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|><|open|>response<|sep|>",
        "<|close|>response<|sep|>",
        "<|open|>tools<|sep|>",
        '<|open|>call tool="f" index="1"<|sep|>',
        "<|close|>call<|sep|>",
        '<|open|>argument key="k" type="number"<|sep|>',
        "<|close|>argument<|sep|>",
        "1",
        "[]",
        "image 9x9",
        "image " + "9" * 5000 + "x1",
        "video",
        "00:00:01.000",
        "text",
        "\u00e9",
    ]
)


@settings(
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(snippets=st.lists(SNIPPETS, max_size=25), cut=st.integers(0, 3))
def test_any_ids_come_back_or_are_refused(tiny, snippets, cut):
    ids = tiny.encode_segment("".join(snippets), allow_special=True)
    ids = ids[: len(ids) - cut]
    try:
        found = parse_ids(ids, tiny)
    except TemplateError as exc:
        assert exc.code in ("malformed_transcript", "not_canonical", "invalid_request")  # noqa: PT017
    else:
        assert encode(rendered(found), tiny) == ids


def test_ids_that_are_not_text_are_an_error(tiny):
    ids = encode(render([Message(role="user", parts=(TextPart("é"),))]), tiny)
    broken = [token_id for token_id in ids if tiny.token_bytes(token_id) != b"\xc3"]
    assert len(broken) == len(ids) - 1
    with pytest.raises(TemplateError, match="are not UTF-8 text"):
        parse_ids(broken, tiny)


def test_ids_that_no_parts_encode_to_are_not_what_the_template_writes(k3):
    """A token of half a character, where K3's vocabulary has one for the whole."""
    letter = "\u4e2d"
    ids = encode(render([Message(role="user", parts=(TextPart(letter),))]), k3)
    (whole,) = k3.encode_segment(letter, allow_special=False)
    single = {k3.token_bytes(i): i for i in range(256)}
    bytes_apart = [single[bytes([byte])] for byte in letter.encode()]
    at = ids.index(whole)
    with pytest.raises(TemplateError, match=f"token {at} of") as caught:
        parse_ids(ids[:at] + bytes_apart + ids[at + 1 :], k3)
    assert caught.value.code == "not_canonical"


def test_text_in_odd_tokens_is_given_up_in_time(k3):
    text = "Hello world " * 2000
    ids = encode(render([Message(role="user", parts=(TextPart(text),))]), k3)
    whole = k3.encode_segment(text, allow_special=False)
    letters = [i for letter in text for i in k3.encode_segment(letter, allow_special=False)]
    at = ids.index(whole[0])
    with cpu_limit(10), pytest.raises(TemplateError, match="is not what the template writes"):
        parse_ids(ids[:at] + letters + ids[at + len(whole) :], k3)


def test_letters_encoded_one_by_one_come_back_as_parts(k3):
    ids = encode(render([Message(role="user", parts=(TextPart("Hello"),))]), k3)
    (hello,) = k3.encode_segment("Hello", allow_special=False)
    letters = [i for letter in "Hello" for i in k3.encode_segment(letter, allow_special=False)]
    at = ids.index(hello)
    spelled = ids[:at] + letters + ids[at + 1 :]
    found = parse_ids(spelled, k3)  # five text parts give the same ids
    assert len(found.messages[0].parts) == 5
