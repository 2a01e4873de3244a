"""``k3vl serve --backend``: the same API in front of another server, a real one and bad ones."""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest
from click.testing import CliRunner

from k3vl.app.cli import cli
from k3vl.app.upstream.endpoint import Endpoint
from k3vl.app.upstream.engine import UpstreamEngine
from k3vl.config import checkpoint_path, load_media_config
from k3vl.types import ChatOptions
from k3vl.vision.processor import MediaProcessor
from tests.app.serving import (
    EXAMPLES,
    Process,
    ask,
    data_url,
    get,
    image_part,
    in_thread,
    metric,
    post,
    until,
)
from tests.app.test_server import LOOK, SCHEMA
from tests.vision.files import solid_frames, video

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

UPSTREAM_KEY = "key-of-the-upstream"
LABELS = [json.loads(line) for line in (EXAMPLES / "labels.jsonl").read_text().splitlines()]
PICTURES = [label for label in LABELS if not label["file"].endswith(".mp4")]
CLIP = next(label for label in LABELS if label["file"].endswith(".mp4"))


@dataclass
class Pair:
    """A server, and one in front of it."""

    upstream: Process
    front: Process
    client: openai.OpenAI


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    upstream = Process("--api-key", UPSTREAM_KEY, "--served-model-name", "its-own-name")
    front = Process(
        *("--backend", upstream.url + "/v1", "--backend-key", UPSTREAM_KEY, "--model", "demo"),
        *("--served-model-name", "demo"),
    )
    with openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0) as client:
        yield Pair(upstream, front, client)
    assert front.stop() == 0
    assert upstream.stop() == 0
    for process in (front, upstream):
        text = "\n".join(process.lines)
        assert "Traceback" not in text
        assert UPSTREAM_KEY not in text
        assert "base64" not in text


def part_of(label: dict[str, Any]) -> dict[str, Any]:
    data = (EXAMPLES / label["file"]).read_bytes()
    kind = "video" if label["file"].endswith(".mp4") else "image"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": data_url(data)}}


# ---------------------------------------------------------------------- a real one


@pytest.mark.parametrize("label", PICTURES, ids=lambda label: label["file"])
def test_pictures_are_answered_and_counted_as_there(pair: Pair, label) -> None:
    body = ask(part_of(label), label["prompt"])
    reply = pair.client.chat.completions.create(**body)
    assert reply.choices[0].message.content == label["expected"]
    assert reply.model == "demo"
    counted = post(pair.front.url, body, "/v1/tokenize").json()
    there = post(
        pair.upstream.url,
        {**body, "model": "its-own-name"},
        "/v1/tokenize",
        headers={"authorization": f"Bearer {UPSTREAM_KEY}"},
    ).json()
    assert reply.usage.prompt_tokens == counted["prompt_tokens"]
    assert reply.usage.prompt_tokens_details.image_tokens == counted["image_tokens"]
    assert counted["image_tokens"] == there["image_tokens"]


def test_a_clip_goes_as_frames_behind_their_times(pair: Pair) -> None:
    body = ask(part_of(CLIP), CLIP["prompt"])
    reply = pair.client.chat.completions.create(**body)
    assert "sailboat" in reply.choices[0].message.content.lower()
    counted = post(pair.front.url, body, "/v1/tokenize").json()
    assert reply.usage.prompt_tokens == counted["prompt_tokens"], "the upstream got as much"
    details = reply.usage.prompt_tokens_details
    assert (details.image_tokens, details.video_tokens) == (0, counted["video_tokens"])
    assert details.video_tokens > 0


def test_a_native_clip_is_described_as_there(pair: Pair) -> None:
    front = Process(
        *("--backend", pair.upstream.url + "/v1/", "--backend-key", UPSTREAM_KEY),
        *("--backend-model", "its-own-name", "--backend-video", "native", "--model", "demo"),
    )
    try:
        body = ask(part_of(CLIP), CLIP["prompt"], model="its-own-name")
        reply = post(front.url, body).json()
        assert reply["choices"][0]["message"]["content"] == CLIP["expected"]
        counted = post(front.url, body, "/v1/tokenize").json()
        assert reply["usage"]["prompt_tokens"] == counted["prompt_tokens"]
    finally:
        assert front.stop() == 0


def test_streams_and_their_counts(pair: Pair) -> None:
    label = PICTURES[0]
    *chunks, last = pair.client.chat.completions.create(
        **ask(part_of(label), label["prompt"]),
        stream=True,
        stream_options={"include_usage": True},
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == label["expected"]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage.prompt_tokens_details.image_tokens == 192
    assert last.usage.completion_tokens > 0


def test_choices_logprobs_seeds_and_stops(pair: Pair) -> None:
    def create(**fields: Any) -> Any:
        asked = ask(part_of(PICTURES[0]), PICTURES[0]["prompt"])
        return pair.client.chat.completions.create(**asked, **fields)

    reply = create(n=2, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in reply.choices] == [0, 1]
    for choice in reply.choices:
        tokens = choice.logprobs.content
        assert "".join(token.token for token in tokens) == choice.message.content
        assert [len(token.top_logprobs) for token in tokens] == [2] * len(tokens)
    both = sum(len(choice.logprobs.content) for choice in reply.choices)
    assert reply.usage.completion_tokens >= both
    assert create(stop=[" kite"]).choices[0].message.content == "A fox, a"
    assert create(max_completion_tokens=2).choices[0].finish_reason == "length"
    drawn = [
        create(temperature=2, seed=seed, max_tokens=12).choices[0].message.content
        for seed in (3, 3, 4)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_tools_loop(pair: Pair) -> None:
    asked = ask(part_of(PICTURES[0]), "What is this?")["messages"]
    choice = {"type": "function", "function": {"name": "look"}}
    reply = pair.client.chat.completions.create(
        model="demo", messages=asked, tools=[LOOK], tool_choice=choice
    )
    message = reply.choices[0].message
    assert reply.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    (call,) = message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"kind", "count"}
    result = {"role": "tool", "tool_call_id": call.id, "content": [part_of(PICTURES[0])]}
    again = pair.client.chat.completions.create(
        model="demo",
        messages=[*asked, message.model_dump(exclude_none=True), result],
        tools=[LOOK],
        max_tokens=8,
    )
    assert again.usage.prompt_tokens_details.image_tokens == 2 * 192
    pieces = []
    for chunk in pair.client.chat.completions.create(
        model="demo", messages=asked, tools=[LOOK], tool_choice="required", stream=True,
        parallel_tool_calls=False,
    ):  # fmt: skip
        pieces += [call.function.arguments for call in chunk.choices[0].delta.tool_calls or ()]
    assert set(json.loads("".join(pieces))) == {"kind", "count"}
    assert len([piece for piece in pieces if piece]) > 1


def test_a_schema_behind_reasoning(pair: Pair) -> None:
    reply = pair.client.chat.completions.create(
        **ask(part_of(PICTURES[0]), "What is this?"),
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        reasoning_effort="low",
        max_tokens=300,
    )
    value = json.loads(reply.choices[0].message.content)
    assert value["kind"] in ("animal", "vehicle")
    assert reply.usage.completion_tokens_details.reasoning_tokens > 0


def test_a_partial_answer_is_continued(pair: Pair) -> None:
    asked = ask(part_of(PICTURES[0]), PICTURES[0]["prompt"])["messages"]
    begun = {"role": "assistant", "content": "A fox, a", "partial": True}
    reply = pair.client.chat.completions.create(model="demo", messages=[*asked, begun])
    assert reply.choices[0].message.content == " kite and a bus."


def num_asked(pair: Pair) -> float:
    name = 'k3vl_http_responses_total{path="/v1/chat/completions"'
    page = get(pair.upstream.url + "/metrics").text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


def test_bad_media_never_reach_it(pair: Pair) -> None:
    before = num_asked(pair)
    for source in (b"%PDF-1.7\n", b"", "http://127.0.0.1:9/x.png", "file:///etc/passwd"):
        reply = post(pair.front.url, ask("x", image_part(source)))
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "messages[0].content[1]"
    assert num_asked(pair) == before


def test_its_refusals_are_ours(pair: Pair) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        pair.client.chat.completions.create(
            **ask("x"),
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "nonsense"}},
            },
        )
    assert caught.value.body["code"] == "invalid_json_schema"
    assert pair.upstream.url not in str(caught.value)


def test_leaving_ends_the_work_there(pair: Pair) -> None:
    body = ask("x", stream=True, max_tokens=4000, response_format={"type": "json_object"})
    with (
        httpx2.Client(timeout=60) as client,
        client.stream("POST", pair.front.url + "/v1/chat/completions", json=body) as reply,
    ):
        lines = reply.iter_lines()
        next(lines)
        until(lambda: metric(pair.upstream.url, "k3vl_requests_running ") == 1)
    until(lambda: metric(pair.upstream.url, "k3vl_requests_running ") == 0)
    until(lambda: metric(pair.front.url, "k3vl_requests_running ") == 0)
    assert metric(pair.front.url, "k3vl_requests_waiting ") == 0


def test_models_and_readiness(pair: Pair) -> None:
    (model,) = pair.client.models.list()
    assert (model.id, model.context_length) == ("demo", 4096)
    assert get(pair.front.url + "/ready").json() == {"status": "ready"}


# ---------------------------------------------------------------------- bad ones


@dataclass
class Fake:
    """An endpoint that does whatever the test says; ``bodies`` is what it was asked."""

    behave: Callable[[BaseHTTPRequestHandler], None]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""


@contextlib.contextmanager
def fake(behave: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[Fake]:
    made = Fake(behave)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers["content-length"])
            made.bodies.append(json.loads(self.rfile.read(size)))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                made.behave(self)

        def do_GET(self) -> None:
            answer(self, 200, {"data": [{"id": "kimi-k3", "max_model_len": 1000}]})

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.ended = threading.Event()
        made.url = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield made
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()


def answer(handler: BaseHTTPRequestHandler, status: int, data: Any, **headers: str) -> None:
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    handler.send_response(status)
    for name, value in {"content-type": "application/json", **headers}.items():
        handler.send_header(name, value)
    handler.send_header("content-length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def events(handler: BaseHTTPRequestHandler, *items: Any) -> None:
    """A stream of events that ends with the connection."""
    handler.send_response(200)
    handler.send_header("content-type", "text/event-stream")
    handler.end_headers()
    for item in items:
        data = item if isinstance(item, str) else json.dumps(item)
        handler.wfile.write(f"data: {data}\n\n".encode())
        handler.wfile.flush()


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> dict:
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish}
    return {"choices": [choice], **more}


YES = chunk({"content": "yes"})
END = chunk(finish="stop")


@contextlib.contextmanager
def front_of(made: Fake, read_seconds: float = 60.0) -> Iterator[str]:
    engine = UpstreamEngine(
        Endpoint(made.url, read_seconds=read_seconds),
        model="kimi-k3",
        processor=MediaProcessor(load_media_config(checkpoint_path("demo"))),
        defaults=ChatOptions(),
    )
    with in_thread(engine, media_workers=1) as (url, _):
        yield url


def hang(handler: BaseHTTPRequestHandler) -> None:
    handler.server.ended.wait(60)


def hang_in_stream(handler: BaseHTTPRequestHandler) -> None:
    events(handler, YES)
    hang(handler)


def patience(behave: Callable[[BaseHTTPRequestHandler], None]) -> float:
    """Seconds that are waited for an endpoint: few where it hangs."""
    return 1.5 if behave in (hang, hang_in_stream) else 60.0


SECRET = {"error": {"message": "at 10.0.0.7 " + "x" * 5000, "code": "its_code"}}
BEFORE = [
    ("500", lambda h: answer(h, 500, SECRET), 502, "backend_failed"),
    ("503", lambda h: answer(h, 503, b"busy"), 503, "backend_unavailable"),
    ("504", lambda h: answer(h, 504, b""), 504, "backend_timeout"),
    ("404", lambda h: answer(h, 404, {}), 502, "backend_failed"),
    ("a redirect", lambda h: answer(h, 302, b"", location="/v2"), 502, "backend_failed"),
    ("our key", lambda h: answer(h, 401, SECRET), 502, "backend_failed"),
    ("400", lambda h: answer(h, 400, SECRET), 400, "its_code"),
    ("400 without JSON", lambda h: answer(h, 400, b"<html>"), 400, "refused_by_backend"),
    ("hang", hang, 504, "backend_timeout"),
    ("no stream", lambda h: answer(h, 200, {"choices": []}), 502, "backend_failed"),
    ("closed at once", lambda h: h.connection.close(), 502, "backend_failed"),
]
DURING = [
    ("no JSON", lambda h: events(h, "{garbage"), 502),
    ("no object", lambda h: events(h, "[1]"), 502),
    ("wrong types", lambda h: events(h, chunk({"content": 5})), 502),
    ("a stranger's answer", lambda h: events(h, {"choices": [{"index": 4}]}), 502),
    ("an error event", lambda h: events(h, YES, {"error": {"message": "boom"}}), 502),
    ("broken off", lambda h: events(h, YES), 502),
    ("broken off with a mark", lambda h: events(h, YES, "[DONE]"), 502),
    ("nothing", lambda h: events(h), 502),
    ("a nameless call", lambda h: events(h, chunk({"tool_calls": [{"index": 0}]}), END), 502),
    ("hang", hang_in_stream, 504),
]


@pytest.mark.parametrize(
    ("behave", "status", "code"), [b[1:] for b in BEFORE], ids=[b[0] for b in BEFORE]
)
@pytest.mark.parametrize("stream", [False, True])
def test_failures_before_the_answer_have_their_status(behave, status, code, stream) -> None:
    with fake(behave) as made, front_of(made, patience(behave)) as url:
        reply = post(url, ask("x", stream=stream))
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
        assert len(reply.json()["error"]["message"]) < 400
        assert made.url.removeprefix("http://") not in reply.text
        made.behave = lambda h: events(h, YES, END, "[DONE]")
        fine = post(url, ask("x")).json()
        assert fine["choices"][0]["message"]["content"] == "yes"
        until(lambda: metric(url, "k3vl_requests_running ") == 0)


@pytest.mark.parametrize(("behave", "status"), [d[1:] for d in DURING], ids=[d[0] for d in DURING])
def test_failures_in_the_answer_end_it_with_an_error(behave, status) -> None:
    with fake(behave) as made, front_of(made, patience(behave)) as url:
        assert post(url, ask("x")).status_code == status
        reply = post(url, ask("x", stream=True))
        assert reply.status_code == 200
        last = json.loads(reply.text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["type"] == "server_error"
        assert "[DONE]" not in reply.text
        until(lambda: metric(url, "k3vl_requests_running ") == 0)


def test_nobody_there_is_503() -> None:
    with fake(hang) as made:
        pass
    with front_of(made) as url:
        assert post(url, ask("x")).status_code == 503
        assert get(url + "/ready").status_code == 503
        assert get(url + "/health").status_code == 200


def test_too_much_to_do_there_is_429_here() -> None:
    with (
        fake(lambda h: answer(h, 429, {}, **{"retry-after": "7"})) as made,
        front_of(made) as url,
    ):
        for stream in (False, True):
            reply = post(url, ask("x", stream=stream))
            assert reply.status_code == 429
            assert reply.headers["retry-after"] == "7"
        made.behave = lambda h: answer(h, 429, {}, **{"retry-after": "tomorrow"})
        assert post(url, ask("x")).headers["retry-after"] == "1"


def test_a_slow_stream_is_passed_on_as_it_comes() -> None:
    """Each piece is sent only after the one before it has arrived here."""
    arrived = threading.Semaphore(0)

    def behave(handler: BaseHTTPRequestHandler) -> None:
        events(handler, next(pieces))
        for piece in pieces:
            assert arrived.acquire(timeout=60)
            handler.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
            handler.wfile.flush()

    pieces = iter((YES, YES, YES, END))
    with (
        fake(behave) as made,
        front_of(made) as url,
        httpx2.Client(timeout=30) as client,
    ):
        body = ask("x", stream=True)
        with client.stream("POST", url + "/v1/chat/completions", json=body) as reply:
            lines = (line for line in reply.iter_lines() if '"content":"yes"' in line)
            for _ in range(3):
                assert next(lines)
                arrived.release()


def test_what_is_asked_there() -> None:
    tool = {**LOOK, "strict": True}
    history = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "Hello", "name": "ann"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{bad"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
        {"role": "system", "tools": [{"type": "function", "function": {"name": "later"}}]},
    ]
    sent = {
        "tools": [tool],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
        "thinking": {"type": "enabled", "effort": "low"},
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 5,
        "stop": "end",
        "n": 1,
        "logprobs": True,
        "top_logprobs": 2,
        "cache_salt": "tenant",
        "user": "u",
    }
    ours = {"metadata": {"a": "b"}, "store": False, "media_errors": "placeholder"}
    with fake(lambda h: events(h, YES, END)) as made, front_of(made) as url:
        body = {"model": "demo", "messages": history, "max_tokens": 9, **sent, **ours}
        assert post(url, body).status_code == 200
        (asked,) = made.bodies
    messages = asked.pop("messages")
    assert asked == {
        **sent,
        "model": "kimi-k3",
        "max_completion_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert messages == [
        {"role": "system", "content": "Be kind."},
        history[1],
        history[2],
        history[3],
        {"role": "system", "content": "", "tools": history[4]["tools"]},
    ]


def test_what_is_not_sent_here_is_its_own_choice() -> None:
    """Sampling above all: its defaults are the model's, ours would be greedy."""
    with fake(lambda h: events(h, YES, END)) as made, front_of(made) as url:
        assert post(url, {"model": "demo", "messages": ask("x")["messages"]}).status_code == 200
        (asked,) = made.bodies
    ours = {"model", "messages", "max_completion_tokens", "stream", "stream_options"}
    assert asked.keys() == ours


def test_a_clip_reaches_it_in_groups_of_four_frames() -> None:
    with fake(lambda h: events(h, YES, END)) as made, front_of(made) as url:
        clip = data_url(video(solid_frames(24), rate=4), "video/mp4")
        reply = post(url, ask({"type": "video_url", "video_url": clip}, "x"))
        (asked,) = made.bodies
    parts = asked["messages"][0]["content"]
    kinds = [part["type"] for part in parts[:-1]]
    num_frames = kinds.count("image_url")
    assert num_frames > 4
    full, rest = divmod(num_frames, 4)
    groups = [*[4] * full, *([rest] if rest else [])]
    assert kinds == [kind for size in groups for kind in ["text", *["image_url"] * size]]
    clocks = [part["text"] for part in parts[:-1] if part["type"] == "text"]
    assert clocks[0] == "00:00:00.000"
    assert clocks == sorted(set(clocks))
    assert reply.json()["usage"]["prompt_tokens_details"]["video_tokens"] > 0


def test_counts_in_every_spelling() -> None:
    spellings = [
        {
            "prompt_tokens": 9,
            "completion_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 5},
            "completion_tokens_details": {"reasoning_tokens": 3},
        },
        {"prompt_tokens": 9, "completion_tokens": 4, "cached_tokens": 5, "reasoning_tokens": 3},
    ]
    thought = chunk({"reasoning": "Hm."})
    streams = [
        *[[thought, YES, END, {"choices": [], "usage": usage}] for usage in spellings],
        [thought, YES, {"choices": [{**END["choices"][0], "usage": spellings[1]}]}],
    ]
    for items in streams:
        with fake(lambda h, items=items: events(h, *items)) as made, front_of(made) as url:
            reply = post(url, ask("x")).json()
        usage = reply["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (9, 4)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 5
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 3
        assert reply["choices"][0]["message"]["reasoning_content"] == "Hm."
    with fake(lambda h: events(h, YES, END)) as made, front_of(made) as url:
        usage = post(url, ask("x")).json()["usage"]
        assert usage["completion_tokens"] == 0, "it told none"


def test_without_a_tokenizer_nothing_is_counted() -> None:
    with fake(lambda h: events(h, YES, END)) as made, front_of(made) as url:
        reply = post(url, ask("x"), "/v1/tokenize")
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "no_tokenizer"


# ---------------------------------------------------------------------- at start


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--backend", "example.org"], "not an http"),
        (["--backend", "http://127.0.0.1:9/v1"], "no answer"),
        (["--backend", "{url}", "--backend-model", "other"], "no model 'other'"),
    ],
)
def test_a_backend_that_cannot_serve_is_one_line(arguments, words) -> None:
    with fake(hang) as made:
        filled = [argument.format(url=made.url) for argument in arguments]
        result = CliRunner().invoke(cli, ["serve", *filled])
    assert result.exit_code == 1
    assert words in result.output
    assert len(result.output.splitlines()) == 1
