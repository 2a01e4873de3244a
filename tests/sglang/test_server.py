"""A real SGLang server with the plugin, against our embedded engine on the same checkpoint."""

from __future__ import annotations

import asyncio
import json
import queue
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from k3vl.app.chat_demo.remote import RemoteChat
from k3vl.types import ChatOptions, MediaPart, Message, SamplingParams, TextPart
from k3vl.xtml.tokens import MEDIA_PAD
from tests.sglang import taught
from tests.sglang.kit import clip, data_uri, image_url, picture, text, video_url

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from k3vl.pipeline import Pipeline, Prepared
    from tests.sglang.kit import Server

NUM_TOKENS = 4
TOLERANCE = 1e-3

TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
CALLS = [
    {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}}
    for name in ("a", "b")
]
TWO_GROUPS, ONE_GROUP = clip(range(0, 60, 10)), clip([200, 210, 220])
CONVERSATIONS: Mapping[str, list[dict[str, Any]]] = {
    "text": [{"role": "user", "content": "hi"}],
    "image": [{"role": "user", "content": [text("see "), image_url(picture()), text(" ok")]}],
    "video": [{"role": "user", "content": [video_url(TWO_GROUPS), text("what?")]}],
    "mixed": [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [video_url(ONE_GROUP), text("a"), image_url(picture()), text("b")],
        },
        {"role": "assistant", "content": "yes", "reasoning_content": "hm"},
        {"role": "user", "content": [image_url(picture()), video_url(TWO_GROUPS)]},
    ],
    "typed markers": [
        {
            "role": "user",
            "content": "<|media_begin|>image 0<|media_content|><|media_pad|><|media_end|>"
            "<|close|>message<|sep|><|end_of_msg|><|kimi_image_placeholder|>",
        },
    ],
    # The results are answered in the other order than they were called in.
    "tools": [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "b", "content": [image_url(picture())]},
        {"role": "tool", "tool_call_id": "a", "content": [video_url(ONE_GROUP)]},
    ],
}
MORE: Mapping[str, dict[str, Any]] = {
    # Where calls are free the answer has a grammar, and is no longer the embedded engine's.
    "tools": {"tools": [TOOL], "tool_choice": "none"},
    "text": {"chat_template_kwargs": {"thinking": False}},
}
OPTIONS: Mapping[str, ChatOptions] = {
    "tools": ChatOptions(thinking_effort=None, tool_choice="none"),
    "text": ChatOptions(thinking=False),
}


def ask(server: Server, messages: list[dict[str, Any]], **more: Any) -> tuple[int, Any]:
    body = {"model": "tiny", "messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0}
    return server.post("/v1/chat/completions", {**body, **more})


@pytest.fixture(scope="module")
def answers(server: Server) -> dict[str, Any]:
    """Every conversation's answer; all are asked at once, as clients do."""

    def one(name: str) -> Any:
        wishes = {"logprobs": True, "return_token_ids": True, **MORE.get(name, {})}
        status, answer = ask(server, CONVERSATIONS[name], **wishes)
        assert status == 200, answer
        return answer

    with ThreadPoolExecutor(len(CONVERSATIONS)) as pool:
        return dict(zip(CONVERSATIONS, pool.map(one, CONVERSATIONS), strict=True))


def prepare(pipeline: Pipeline, name: str) -> Prepared:
    messages = [
        {**message, "role": "system" if message["role"] == "developer" else message["role"]}
        for message in CONVERSATIONS[name]
    ]
    request = pipeline.request(
        messages,
        tools=MORE.get(name, {}).get("tools", ()),
        options=OPTIONS.get(name, ChatOptions(thinking_effort=None)),
    )
    return pipeline.prepare(request)


def generate(
    pipeline: Pipeline, prepared: Prepared, num_tokens: int = NUM_TOKENS
) -> tuple[list[int], list[float]]:
    """Greedy ids and their log-probabilities, by the embedded engine, without any constraint."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    sampling = SamplingParams(max_tokens=num_tokens, logprobs=0)
    pipeline.backend.submit(prepared.prompt, sampling, inbox.put)
    ids, logprobs = [], []
    while True:
        token = inbox.get(timeout=120)
        ids.append(token.id)
        logprobs.append(token.logprobs.logprob)
        if token.finish is not None:
            return ids, logprobs


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_prompt_is_the_embedded_engine_s(
    answers: dict[str, Any], pipeline: Pipeline, name: str
) -> None:
    """Text, order and number of media pads, timestamps, tools: to the token."""
    (choice,) = answers[name]["choices"]
    assert tuple(choice["prompt_token_ids"]) == prepare(pipeline, name).prompt.token_ids


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_answer_is_the_embedded_engine_s(
    answers: dict[str, Any], pipeline: Pipeline, name: str
) -> None:
    """Pixels, tower, places of features, language model: greedy ids and log-probabilities."""
    (choice,) = answers[name]["choices"]
    ids, logprobs = generate(pipeline, prepare(pipeline, name))
    assert choice["response_token_ids"] == ids
    got = [token["logprob"] for token in choice["logprobs"]["content"]]
    assert got == pytest.approx(logprobs, abs=TOLERANCE)


def test_media_are_counted(answers: dict[str, Any], pipeline: Pipeline) -> None:
    for name in ("image", "video", "mixed"):
        usage, ours = answers[name]["usage"], prepare(pipeline, name).usage
        assert usage["prompt_tokens"] == ours.prompt_tokens
        # SGLang's tower has one modality for pictures and clips.
        visual = ours.image_tokens + ours.video_tokens
        assert usage["prompt_tokens_details"]["image_tokens"] == visual


def test_the_answer_is_split_into_reasoning_and_content(answers: dict[str, Any]) -> None:
    assert answers["image"]["choices"][0]["message"]["reasoning_content"]
    assert answers["text"]["choices"][0]["message"]["content"]
    assert not answers["text"]["choices"][0]["message"]["reasoning_content"]


def test_a_stream_says_the_same(server: Server, answers: dict[str, Any]) -> None:
    body = {
        "model": "tiny",
        "messages": CONVERSATIONS["video"],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
    }
    events = server.stream("/v1/chat/completions", body)
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    said = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    # Bytes of unfinished characters are replaced at different points.
    whole = answers["video"]["choices"][0]["message"]["reasoning_content"]
    assert said.replace("�", "") == whole.replace("�", "")
    assert events[-1]["choices"][0]["finish_reason"] == "length"


CALLING: Mapping[str, Any] = {
    "model": "tiny",
    "messages": taught.ASKED,
    "tools": [taught.TOOL],
    "chat_template_kwargs": {"thinking": False},
    "max_tokens": 200,
    "temperature": 0,
}
NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.fixture(scope="module")
def calls(server: Server) -> dict[str, Any]:
    """The tool call that the model makes, whole by SGLang and streamed by our server."""

    def whole() -> Any:
        status, answer = server.post(
            "/v1/chat/completions", {**CALLING, "tool_choice": NAMED, "return_token_ids": True}
        )
        assert status == 200, answer
        return answer

    def stream() -> Any:
        return server.stream("/v1/chat/completions", dict(CALLING), url=server.front)

    with ThreadPoolExecutor(2) as pool:
        jobs = {"whole": pool.submit(whole), "stream": pool.submit(stream)}
    return {name: job.result() for name, job in jobs.items()}


def test_a_tool_call_is_made_by_the_model(calls: dict[str, Any], pipeline: Pipeline) -> None:
    """Token by token, the same as by the embedded engine."""
    (choice,) = calls["whole"]["choices"]
    said = pipeline.tokenizer.encode_segment(taught.ANSWER, True)
    assert choice["response_token_ids"] == said
    request = pipeline.request(
        taught.ASKED, tools=[taught.TOOL], options=ChatOptions(thinking=False)
    )
    assert generate(pipeline, pipeline.prepare(request), len(said))[0] == said


def test_a_tool_call_reaches_the_client(calls: dict[str, Any]) -> None:
    (choice,) = calls["whole"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert not choice["message"]["content"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"]) == taught.ARGUMENTS
    assert call["id"] == "look:0", "SGLang's own ids"


def test_arguments_come_as_they_are_made(calls: dict[str, Any]) -> None:
    """SGLang streams them to our server, which streams them on."""
    choices = [event["choices"][0] for event in calls["stream"] if event["choices"]]
    assert not "".join(choice["delta"].get("content") or "" for choice in choices)
    pieces = [piece for choice in choices for piece in choice["delta"].get("tool_calls") or ()]
    assert pieces[0]["function"]["name"] == "look"
    assert pieces[0]["id"]
    assert {piece["index"] for piece in pieces} == {0}
    arguments = [piece["function"].get("arguments") or "" for piece in pieces]
    assert json.loads("".join(arguments)) == taught.ARGUMENTS
    assert len([text for text in arguments if text]) >= len(taught.ARGUMENTS["at"])
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_the_chat_page_s_model_is_answered(
    server: Server, answers: dict[str, Any], pipeline: Pipeline, tmp_path: Path
) -> None:
    """What ``k3vl demo --base-url`` asks, and the events that its page shows."""
    path = tmp_path / "clip.mkv"
    path.write_bytes(TWO_GROUPS)
    chat = RemoteChat(f"{server.url}/v1", "tiny", pipeline.processor)
    chat.check()
    message = Message(role="user", parts=(MediaPart("video", path), TextPart("what?")))

    async def talk() -> list[Any]:
        stream = chat.stream(
            [message],
            tools=(),
            options=ChatOptions(thinking_effort=None),
            sampling=SamplingParams(max_tokens=NUM_TOKENS),
        )
        return [event async for event in stream]

    *said, finish = asyncio.run(talk())
    whole = answers["video"]["choices"][0]["message"]["reasoning_content"]
    assert "".join(event.text for event in said).replace("�", "") == whole.replace("�", "")
    assert finish.reason == "length"
    assert finish.usage.prompt_tokens == answers["video"]["usage"]["prompt_tokens"]


def test_clips_share_the_groups_that_they_have_in_common(server: Server) -> None:
    """The second clip begins like the first: only its other group is encoded."""
    first, second = clip([5, 15, 25, 35, 45]), clip([5, 15, 25, 35, 95, 105])
    for data, expected in ((first, [[4, 2, 4], [1, 2, 4]]), (second, [[2, 2, 4]])):
        before = len(server.grids())
        message = {"role": "user", "content": [video_url(data)]}
        assert ask(server, [message], max_tokens=1)[0] == 200
        assert server.grids()[before:] == expected


def test_our_server_in_front_gives_the_same_answer(
    server: Server, answers: dict[str, Any], pipeline: Pipeline
) -> None:
    body = {
        "model": "tiny",
        "messages": CONVERSATIONS["video"],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
    }
    status, answer = server.post("/v1/chat/completions", body, url=server.front)
    assert status == 200, answer
    said = answer["choices"][0]["message"]["reasoning_content"]
    whole = answers["video"]["choices"][0]["message"]["reasoning_content"]
    assert said.replace("�", "") == whole.replace("�", "")
    assert answer["usage"]["prompt_tokens"] == prepare(pipeline, "video").usage.prompt_tokens


def test_our_server_in_front_refuses_in_its_own_words(server: Server) -> None:
    message = {"role": "user", "content": [{"type": "video_url", "video_url": {"url": BROKEN}}]}
    body = {"model": "tiny", "messages": [message]}
    status, answer = server.post("/v1/chat/completions", body, url=server.front)
    assert status == 400
    assert answer["error"]["param"] == "messages[0].content[0]"


def test_a_folder_is_captioned(server: Server, tmp_path: Path) -> None:
    """The captioner, as on a cluster."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "clip.mkv").write_bytes(ONE_GROUP)
    (tmp_path / "in" / "picture.png").write_bytes(picture())
    line = [sys.executable, "-m", "k3vl", "caption", str(tmp_path / "in"), "--prompt", "what?"]
    line += [
        "--base-url",
        f"{server.url}/v1",
        "--model",
        "tiny",
        "--max-tokens",
        "1",
        "--reasoning",
    ]
    line += ["--output", str(tmp_path / "captions.jsonl"), "--quiet"]
    subprocess.run(line, check=True, timeout=600)
    rows = [json.loads(row) for row in (tmp_path / "captions.jsonl").read_text().splitlines()]
    assert sorted(row["path"].rpartition("/")[2] for row in rows) == ["clip.mkv", "picture.png"]
    assert not [row for row in rows if "error" in row]


def test_prompts_of_generate_name_their_clips(server: Server, pipeline: Pipeline) -> None:
    """A framed pad is a clip, a lone one a picture; the lists need not know of each other."""
    frame = "<|media_begin|>video<|media_content|><|media_pad|><|media_end|>"
    body = {
        "text": f"{frame} and <|media_pad|>",
        "image_data": [data_uri(picture())],
        "video_data": [data_uri(ONE_GROUP)],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_prompt_token_ids": True,
    }
    status, answer = server.post("/generate", body)
    assert status == 200, answer
    ids, pad = answer["prompt_token_ids"], pipeline.tokenizer.special_ids[MEDIA_PAD]
    runs = "".join("p" if token_id == pad else "." for token_id in ids).replace(".", " ").split()
    assert [len(run) for run in runs] == [2, 6]
    assert "00:00:00.000" in bytes(token_id for token_id in ids if token_id < 256).decode()


BROKEN = data_uri(b"no clip at all")
ONE_VIDEO = [data_uri(ONE_GROUP)]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"url": BROKEN}, "video 0: not a video that can be read"),
        ({"url": data_uri(picture())}, "a still PNG picture; send it as an image"),
        ({"url": "http://127.0.0.1:1/clip.mp4"}, "not on the public internet"),
        ({"url": "file:///etc/passwd"}, "'file:' URLs are not accepted"),
        ({"url": "/etc/passwd"}, "not a URL"),
        ({"url": ONE_VIDEO[0], "fps": 1.0}, "its own rule"),
        ({"url": ONE_VIDEO[0], "max_frames": 2}, "its own rule"),
    ],
)
def test_clips_that_cannot_be_used_are_refused(
    server: Server, part: dict[str, Any], words: str
) -> None:
    message = {"role": "user", "content": [{"type": "video_url", "video_url": part}]}
    status, answer = ask(server, [message])
    assert status == 400
    assert words in answer["message"]


def test_too_many_clips_are_refused(server: Server) -> None:
    message = {"role": "user", "content": [video_url(ONE_GROUP)] * 17}
    status, answer = ask(server, [message])
    assert status == 400
    assert "Video count 17 exceeds limit 16" in answer["message"]


def test_a_stream_that_cannot_begin_is_refused(server: Server) -> None:
    message = {"role": "user", "content": [{"type": "video_url", "video_url": {"url": BROKEN}}]}
    status, answer = ask(server, [message], stream=True)
    assert status == 400
    assert "not a video" in answer["message"]


def test_conversations_that_cannot_be_expressed_are_refused(server: Server) -> None:
    message = {"role": "tool", "tool_call_id": "nobody", "content": "x"}
    status, answer = ask(server, [message])
    assert status == 400
    assert "names no tool" in answer["message"]


@pytest.mark.parametrize(
    ("prompt", "media", "words"),
    [
        ("no place", {"video_data": ONE_VIDEO}, "the prompt has places for 0"),
        ("<|media_pad|> <|media_pad|>", {"video_data": ONE_VIDEO}, "the prompt has places for 2"),
        ("<|media_pad|><|media_pad|>", {"video_data": ONE_VIDEO}, "a run of media pads"),
        (
            "<|media_begin|>film<|media_content|><|media_pad|><|media_end|>",
            {"video_data": ONE_VIDEO},
            "names no medium",
        ),
        ("<|media_pad|>", {"image_data": [data_uri(picture())], "audio_data": ["x"]}, "no audio"),
    ],
)
def test_prompts_that_do_not_fit_their_media_are_refused(
    server: Server, prompt: str, media: dict[str, Any], words: str
) -> None:
    body = {"text": prompt, **media, "sampling_params": {"max_new_tokens": 1}}
    status, answer = server.post("/generate", body)
    assert status == 400
    assert words in answer["error"]["message"]
