"""Keys, limits, queues, disconnects and endings, around an engine that the test plays."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import psutil
import pytest

from k3vl.app.sse import KEEP_ALIVE, send_events
from k3vl.errors import BackendError
from k3vl.vision.source import FetchPolicy
from tests.app.serving import (
    EXAMPLES,
    Process,
    ask,
    fake_pipeline,
    get,
    image_part,
    in_thread,
    metric,
    post,
    until,
)
from tests.fakes import FakeBackend, HeldBackend

KEY = "correct-horse-battery"
FOX = (EXAMPLES / "fox-kite-bus.png").read_bytes()


def ids(pipeline, text: str) -> list[int]:
    return [*pipeline.tokenizer.encode_segment(text, False), pipeline.tokenizer.stop_ids[0]]


@pytest.fixture(scope="module")
def held():
    backend = HeldBackend()
    policy = FetchPolicy(allow_private_networks=True)
    pipeline = fake_pipeline(backend, policy=policy)
    settings = {
        "max_running": 2,
        "max_waiting": 1,
        "max_body_bytes": 2**20,
        "media_workers": 1,
        "api_keys": (KEY, "another-long-key"),
        "cors_origins": ("https://page.example",),
    }
    with in_thread(pipeline, **settings) as (url, server):
        yield backend, url, server


AUTH = {"authorization": f"Bearer {KEY}"}


def idle(url: str) -> bool:
    names = ("k3vl_requests_running ", "k3vl_requests_waiting ", "k3vl_media_jobs ")
    return all(metric(url, name) == 0 for name in names)


@contextlib.contextmanager
def streaming(url: str, body: dict):
    with (
        httpx2.Client(timeout=60) as client,
        client.stream(
            "POST", url + "/v1/chat/completions", json={**body, "stream": True}, headers=AUTH
        ) as reply,
    ):
        yield reply


# ---------------------------------------------------------------------- access


@pytest.mark.parametrize("header", [{}, {"authorization": "Bearer wrong"}, {"authorization": KEY}])
def test_without_the_key_nothing_is_read(held, header) -> None:
    _, url, _ = held
    reply = httpx2.post(url + "/v1/chat/completions", content=b"{", headers=header, timeout=60)
    assert reply.status_code == 401
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert get(url + "/v1/models", headers=header).status_code == 401
    assert get(url + "/health", headers=header).status_code == 200


def test_every_key_opens(held) -> None:
    _, url, _ = held
    for key in (KEY, "another-long-key"):
        headers = {"authorization": f"bearer {key}"}
        assert get(url + "/v1/models", headers=headers).status_code == 200


def test_cors_answers_for_the_listed_origin_only(held) -> None:
    _, url, _ = held
    asking = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    for origin, allowed in (("https://page.example", True), ("https://evil.example", False)):
        reply = httpx2.options(
            url + "/v1/chat/completions", headers={"origin": origin, **asking}, timeout=60
        )
        assert (reply.headers.get("access-control-allow-origin") == origin) == allowed


# ---------------------------------------------------------------------- sizes


def test_a_declared_large_body_is_not_read(held) -> None:
    """It is refused though nothing of it is ever sent."""
    _, url, _ = held
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.putrequest("POST", "/v1/chat/completions")
    for name, value in {**AUTH, "content-type": "application/json"}.items():
        connection.putheader(name, value)
    connection.putheader("content-length", str(5 * 2**20))
    connection.endheaders()
    reply = connection.getresponse()
    assert reply.status == 413
    assert json.loads(reply.read())["error"]["code"] == "request_too_large"
    connection.close()
    assert idle(url)


def test_an_endless_body_is_cut_off(held) -> None:
    _, url, _ = held

    def chunks():
        for _ in range(40):
            yield b" " * 2**16

    reply = httpx2.post(
        url + "/v1/chat/completions",
        content=chunks(),
        headers={**AUTH, "content-type": "application/json"},
        timeout=60,
    )
    assert reply.status_code == 413
    assert idle(url)


def test_text_that_can_never_fit_is_not_tokenised(held) -> None:
    _, url, _ = held
    reply = post(url, ask("x" * 900_000), headers=AUTH)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"


# ---------------------------------------------------------------------- queues


def test_the_queue_is_bounded_and_drains(held) -> None:
    backend, url, server = held
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(post, url, ask("x"), headers=AUTH) for _ in range(3)]
        until(lambda: len(backend.sinks) == 2 and metric(url, "k3vl_requests_waiting ") == 1)
        refused = post(url, ask("x"), headers=AUTH)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "engine_overloaded"
        answer = ids(server.engine.pipeline, "yes")
        while not all(job.done() for job in jobs):
            backend.send(*answer, finish="stop")
            time.sleep(0.01)
        assert [job.result().status_code for job in jobs] == [200] * 3
    until(lambda: idle(url))


# ---------------------------------------------------------------------- leaving


def test_leaving_the_queue_frees_the_place(held) -> None:
    backend, url, server = held
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(post, url, ask("x"), headers=AUTH) for _ in range(2)]
        until(lambda: len(backend.sinks) == 2)
        submitted = backend.num_submitted
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        headers = {**AUTH, "content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(ask("x")), headers)
        until(lambda: metric(url, "k3vl_requests_waiting ") == 1)
        connection.close()
        until(lambda: metric(url, "k3vl_requests_waiting ") == 0)
        backend.send(*ids(server.engine.pipeline, "yes"), finish="stop")
        assert [job.result().status_code for job in jobs] == [200, 200]
    assert backend.num_submitted == submitted, "it never reached the engine"
    until(lambda: idle(url))


def test_leaving_a_stream_frees_its_generation(held) -> None:
    backend, url, server = held
    with streaming(url, ask("x", n=2)) as reply:
        until(lambda: len(backend.sinks) == 2)
        backend.send(*ids(server.engine.pipeline, "word")[:1])
        next(reply.iter_lines())
    until(lambda: not backend.sinks)
    until(lambda: idle(url))


def test_leaving_before_the_whole_answer_frees_it(held) -> None:
    backend, url, _ = held
    host = url.removeprefix("http://")
    connection = http.client.HTTPConnection(host)
    headers = {**AUTH, "content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(ask("x")), headers)
    until(lambda: len(backend.sinks) == 1)
    connection.close()
    until(lambda: not backend.sinks)
    until(lambda: idle(url))


def test_leaving_during_the_body_frees_the_place(held) -> None:
    _, url, _ = held
    address = url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as raw:
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"
            b"Content-Type: application/json\r\nAuthorization: Bearer "
            + KEY.encode()
            + b"\r\n\r\n{"
        )
        until(lambda: metric(url, "k3vl_requests_waiting ") == 1)
    until(lambda: idle(url))


def test_leaving_during_a_fetch_closes_the_fetch(held) -> None:
    backend, url, _ = held
    submitted = backend.num_submitted
    with socket.create_server(("127.0.0.1", 0)) as slow:
        slow.settimeout(60)
        source = f"http://127.0.0.1:{slow.getsockname()[1]}/never.png"
        host = url.removeprefix("http://")
        connection = http.client.HTTPConnection(host)
        headers = {**AUTH, "content-type": "application/json"}
        body = json.dumps(ask(image_part(source)))
        connection.request("POST", "/v1/chat/completions", body, headers)
        fetch, _ = slow.accept()
        fetch.settimeout(60)
        assert fetch.recv(4096).startswith(b"GET /never.png")
        connection.close()
        assert fetch.recv(1) == b"", "the server has let go"
        fetch.close()
    until(lambda: idle(url))
    assert backend.num_submitted == submitted


def storm(url: str, num_requests: int) -> None:
    """Clients that send all of their request, or half of it, and leave at any moment."""
    host, _, port = url.removeprefix("http://").partition(":")
    draw = random.Random(5)

    async def one(number: int, seconds: float) -> None:
        body = ask(image_part(FOX), "x", stream=bool(number % 2)) if number % 3 else ask("x")
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
            f"Authorization: {AUTH['authorization']}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + (data if number % 7 else data[: len(data) // 2]))
        await writer.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await reader.read()
        writer.close()

    async def clients() -> None:
        for first in range(0, num_requests, 24):
            numbers = range(first, min(first + 24, num_requests))
            await asyncio.gather(*(one(number, draw.uniform(0, 0.3)) for number in numbers))

    asyncio.run(clients())


@contextlib.contextmanager
def playing(backend: HeldBackend, server):
    """Tokens for whoever waits, and now and then an end."""
    answer = ids(server.engine.pipeline, "a few words to stream")
    ended = threading.Event()

    def play() -> None:
        while not ended.wait(0.004):
            for token_id in answer[:3]:
                backend.send(token_id)
            if backend.num_submitted % 3 == 0:
                backend.send(answer[-1], finish="stop")

    player = threading.Thread(target=play)
    player.start()
    try:
        yield
    finally:
        ended.set()
        player.join()


def test_a_storm_of_disconnects_leaves_nothing() -> None:
    backend = HeldBackend()
    me = psutil.Process()
    with in_thread(fake_pipeline(backend), media_workers=1) as (url, server):
        with playing(backend, server):
            storm(url, 12)  # connections and threads that stay
        until(lambda: idle(url) and not backend.sinks)
        files, children = me.num_fds(), len(me.children())
        with playing(backend, server):
            storm(url, 96)
        until(lambda: idle(url) and not backend.sinks)
        until(lambda: me.num_fds() <= files + 2)
        until(lambda: len(me.children()) == children)
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(post, url, ask("x"))
            until(lambda: len(backend.sinks) == 1)
            backend.send(*ids(server.engine.pipeline, "yes"), finish="stop")
            assert job.result().status_code == 200
    until(lambda: len(me.children()) < children)


def test_a_thousand_disconnects_leave_nothing_in_a_real_server(tmp_path) -> None:
    process = Process(TMPDIR=str(tmp_path))
    family = psutil.Process(process.process.pid)

    def settled() -> bool:
        pins = metric(process.url, "k3vl_encoder_cache_pins ")
        return idle(process.url) and pins == 0

    def served() -> float:
        page = get(process.url + "/metrics").text
        name = 'k3vl_http_responses_total{path="/v1/chat/completions"'
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))

    try:
        storm(process.url, 24)  # connections and threads that stay
        until(settled)
        files, children, before = family.num_fds(), len(family.children()), served()
        storm(process.url, 1000)
        until(settled)
        assert served() - before > 900, "fewer arrived than were sent"
        assert metric(process.url, "k3vl_requests_cancelled_total ") > 300
        until(lambda: family.num_fds() <= files + 2)
        until(lambda: len(family.children()) == children)
        assert list(tmp_path.iterdir()) == []
        assert post(process.url, ask(image_part(FOX), "x", max_tokens=1)).status_code == 200
    finally:
        assert process.stop() == 0
    assert "Traceback" not in "\n".join(process.lines)


# ---------------------------------------------------------------------- the engine's end


def test_a_dead_engine_is_not_ready_and_says_nothing_private() -> None:
    backend = HeldBackend(is_dead=True)
    with in_thread(fake_pipeline(backend), media_workers=1) as (url, _):
        assert get(url + "/health").status_code == 200
        assert get(url + "/ready").status_code == 503
        reply = post(url, ask("x"))
        assert reply.status_code == 500
        assert reply.json()["error"]["type"] == "server_error"
        assert "secret" not in reply.text
        stream = post(url, ask("x", stream=True))
        assert "secret" not in stream.text
        assert '"server_error"' in stream.text


def test_thinking_is_reported_apart() -> None:
    backend = FakeBackend([])
    pipeline = fake_pipeline(backend)
    text = "Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|>"
    backend.answer = [
        *pipeline.tokenizer.encode_segment(text, True),
        pipeline.tokenizer.stop_ids[0],
    ]
    with in_thread(pipeline, media_workers=1) as (url, _):
        body = ask("x", thinking={"type": "enabled", "effort": "low"})
        reply = post(url, body).json()
        message = reply["choices"][0]["message"]
        assert message["reasoning_content"] == "Hm."
        assert message["content"] == "Yes."
        assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        lines = post(url, {**body, "stream": True}).text
        chunks = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: {")]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
        assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."


def test_answers_under_way_end_before_the_server() -> None:
    backend = HeldBackend()
    pipeline = fake_pipeline(backend)
    answer = ids(pipeline, "yes")
    with ThreadPoolExecutor(1) as pool:
        with in_thread(pipeline, media_workers=1) as (url, _):
            job = pool.submit(post, url, ask("x"))
            until(lambda: len(backend.sinks) == 1)
            threading.Timer(0.3, lambda: backend.send(*answer, finish="stop")).start()
        assert job.result().json()["choices"][0]["message"]["content"] == "yes"


# ---------------------------------------------------------------------- how a stream begins


def sent_by(*steps) -> list:
    """What goes to the client: the status, then pieces of the body.

    Args:
        steps: frames, an error, or a number of comments that are waited for.
    """
    sent: list = []

    async def frames():
        for step in steps:
            if isinstance(step, int):
                awaited = sent.count(KEEP_ALIVE) + step
                while sent.count(KEEP_ALIVE) < awaited:
                    await asyncio.sleep(0.001)
            elif isinstance(step, Exception):
                raise step
            else:
                yield step

    async def send(message) -> None:
        sent.append(message.get("status", message.get("body")))

    def written(exc: Exception) -> bytes:
        return str(exc).encode()

    asyncio.run(asyncio.wait_for(send_events(send, frames(), written, keep_alive=0.05), 60))
    return sent


def test_an_error_before_the_first_frame_has_a_status_of_its_own() -> None:
    with pytest.raises(BackendError):
        sent_by(BackendError("gone"))


def test_an_error_in_a_stream_is_its_last_frame() -> None:
    assert sent_by(b"one", BackendError("gone")) == [200, b"one", b"gone", b""]
    late = sent_by(2, BackendError("gone"))
    assert late[:3] == [200, KEEP_ALIVE, KEEP_ALIVE], "who waits long hears that it goes on"
    assert late[-2:] == [b"gone", b""]


def test_silence_is_filled_with_comments() -> None:
    begun = time.monotonic()
    sent = sent_by(b"one", 3, b"two")
    assert time.monotonic() - begun > 3 * 0.04, "one in each while"
    assert sent == [200, b"one", *[KEEP_ALIVE] * 3, b"two", b""]


# ---------------------------------------------------------------------- media that fail


def test_failed_media_may_be_text_instead() -> None:
    backend = FakeBackend([])
    pipeline = fake_pipeline(backend)
    backend.answer = ids(pipeline, "yes")
    parts = [image_part(b"%PDF-1.7"), "and", image_part(FOX), image_part(b"")]
    with in_thread(pipeline, media_workers=1) as (url, _):
        for value in (None, "fail"):
            refused = post(url, ask(*parts, media_errors=value))
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] in (
                "messages[0].content[0]",
                "messages[0].content[3]",
            )
        body = ask(*parts, media_errors="placeholder")
        reply = post(url, body).json()
        assert reply["choices"][0]["message"]["content"] == "yes"
        first, last = reply["k3vl"]["warnings"]
        assert first.startswith("messages[0].content[0]: PDF documents are not supported")
        assert last.startswith("messages[0].content[3]: ")
        written = "[image left out: pdf_unsupported]", "and", "[image left out: image_empty]"
        same = ask(written[0], "and", image_part(FOX), written[2])
        plans = [post(url, each, "/v1/tokenize").json() for each in (body, same)]
        assert plans[0]["tokens"] == plans[1]["tokens"]
        assert plans[0]["k3vl"]["warnings"] == [first, last]
        assert [media["part"] for media in plans[0]["media"]] == ["messages[0].content[2]"]
        assert post(url, ask(*parts, media_errors="ignore")).status_code == 400
