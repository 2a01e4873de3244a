"""SGLang's chat requests through our encoder, against the same conversation in our own pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from k3vl.types import ChatOptions
from k3vl.xtml.tokens import MEDIA_PAD
from tests.sglang.kit import image_url, picture, text, video_url

if TYPE_CHECKING:
    from k3vl.pipeline import Pipeline

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
HI = {"role": "user", "content": "hi"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}


def encode(pipeline: Pipeline, body: dict[str, Any], *, takes_clips: bool = True) -> list[int]:
    """What SGLang's chat handler gets for a body."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    from k3vl.sglang.chat import K3ChatAdapter

    request = ChatCompletionRequest(model="k3", **body)
    adapter = K3ChatAdapter(pipeline.tokenizer, pipeline.defaults, takes_clips=takes_clips)
    return adapter.encode_messages(
        messages=[message.model_dump() for message in request.messages],
        request=request,
        tools=None,
        thinking=False,
        image_data=[],
    )


THINKING = ChatOptions(thinking_effort=None)
CASES: dict[str, tuple[dict[str, Any], ChatOptions]] = {
    "plain": ({"messages": [HI]}, THINKING),
    "no thinking": (
        {"messages": [HI], "chat_template_kwargs": {"thinking": False}},
        ChatOptions(thinking=False),
    ),
    "reasoning effort none": (
        {"messages": [HI], "reasoning_effort": "none"},
        ChatOptions(thinking=False),
    ),
    "effort": (
        {"messages": [HI], "reasoning_effort": "low"},
        ChatOptions(thinking_effort="low"),
    ),
    "another family's effort": ({"messages": [HI], "reasoning_effort": "medium"}, THINKING),
    "template's effort": (
        {"messages": [HI], "chat_template_kwargs": {"thinking_effort": "max"}},
        ChatOptions(thinking_effort="max"),
    ),
    "no tools": ({"messages": [HI], "tool_choice": "none"}, THINKING),
    "required": (
        {"messages": [HI], "tools": [TOOL], "tool_choice": "required"},
        ChatOptions(thinking_effort=None, tool_choice="required"),
    ),
    "schema": (
        {"messages": [HI], "response_format": SCHEMA},
        ChatOptions(thinking_effort=None, response_format=SCHEMA),
    ),
    "text format": ({"messages": [HI], "response_format": {"type": "text"}}, THINKING),
    "history": (
        {
            "messages": [
                {"role": "system", "tools": [TOOL]},
                HI,
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": "hm",
                    "tool_calls": [
                        {
                            "id": "1",
                            "type": "function",
                            "function": {"name": "look", "arguments": "{no JSON"},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "a cat"},
            ]
        },
        THINKING,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_conversation_is_rendered_as_in_the_pipeline(pipeline: Pipeline, name: str) -> None:
    body, options = CASES[name]
    request = pipeline.request(body["messages"], tools=body.get("tools", ()), options=options)
    assert tuple(encode(pipeline, body)) == pipeline.prepare(request).prompt.token_ids


def test_a_last_message_is_continued(pipeline: Pipeline) -> None:
    last = {"role": "assistant", "content": "I see"}
    body = {"messages": [HI, last], "continue_final_message": True, "add_generation_prompt": False}
    request = pipeline.request([HI, {**last, "partial": True}], options=THINKING)
    assert tuple(encode(pipeline, body)) == pipeline.prepare(request).prompt.token_ids


def test_media_have_slots_by_their_place_in_sglang_s_lists(pipeline: Pipeline) -> None:
    """Results are sorted by their calls; the lists of media are not."""
    calls = [
        {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}}
        for name in "ab"
    ]
    messages = [
        {"role": "user", "content": [image_url(picture())]},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": [image_url(picture()), text("late")]},
        {"role": "tool", "tool_call_id": "a", "content": [image_url(picture()), video_url(b"x")]},
    ]
    ids = encode(pipeline, {"messages": messages})
    pad = pipeline.tokenizer.special_ids[MEDIA_PAD]
    assert ids.count(pad) == 4
    headers = bytes(i for i in ids if i < 256).decode()
    places = [headers.index(word) for word in ("image 0", "image 2", "video 0", "image 1")]
    assert places == sorted(places)


def test_typed_markers_take_no_slot(pipeline: Pipeline) -> None:
    typed = "<|media_begin|>image 0<|media_content|><|media_pad|><|media_end|>"
    message = {"role": "user", "content": [text(typed), image_url(picture())]}
    ids = encode(pipeline, {"messages": [message]})
    assert ids.count(pipeline.tokenizer.special_ids[MEDIA_PAD]) == 1


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "tool", "tool_call_id": "x", "content": "y"}, "names no tool"),
        (
            {
                "role": "user",
                "content": [{"type": "audio_url", "audio_url": {"url": "data:,"}}],
            },
            "must carry 'text'",
        ),
    ],
)
def test_what_cannot_be_expressed_is_a_value_error(
    pipeline: Pipeline, message: dict[str, Any], words: str
) -> None:
    """SGLang answers those with 400 and our words."""
    with pytest.raises(ValueError, match=words):
        encode(pipeline, {"messages": [message]})


def test_clips_are_refused_where_an_encoder_server_would_get_them(
    pipeline: Pipeline,
) -> None:
    pictures = {"role": "user", "content": [image_url(picture())]}
    assert encode(pipeline, {"messages": [pictures]}, takes_clips=False)
    clips = {"role": "user", "content": [video_url(b"x")]}
    with pytest.raises(ValueError, match="carries pictures only"):
        encode(pipeline, {"messages": [clips]}, takes_clips=False)
