"""An OpenAI-compatible endpoint that fails at random, is slow, refuses, or lies."""

from __future__ import annotations

import base64
import http.server
import io
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from k3vl.app.captioning import remote
from tests.app.captioning_kit import picture, pictures, rows, run


class Endpoint(http.server.ThreadingHTTPServer):
    """Answers with the average colour of the picture that it was sent.

    Attributes:
        faults: how many of the requests fail, from 0 to 1.
        bodies, keys: what was asked.
        answered: pictures that were answered, by colour.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults = 0.0
        self.delay = 0.0
        self.status: int | None = None
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.answered: list[str] = []
        self.random = random.Random(3)
        self.lock = threading.Lock()
        self.busy = self.most_busy = 0

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has given up is no news."""


class Handler(http.server.BaseHTTPRequestHandler):
    server: Endpoint
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "kimi-k3"}]})

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append(body)
            server.keys.append(self.headers.get("Authorization"))
            fails = server.random.random() < server.faults
            fault = server.random.randrange(5)
            server.busy += 1
            server.most_busy = max(server.most_busy, server.busy)
        time.sleep(server.delay)
        try:
            self._answer(body, fault if fails else None)
        finally:
            with server.lock:
                server.busy -= 1

    def _answer(self, body: dict[str, Any], fault: int | None) -> None:
        if self.server.status:
            self._send(self.server.status, {"error": {"message": "not\nlike this"}})
        elif fault == 0:
            self.close_connection = True  # no answer at all
        elif fault == 1:
            self._send(503, {"error": "busy"})
        elif fault == 2:
            self._send(429, {"error": "slow down"}, retry_after="0.02")
        elif fault == 3:
            self._send(200, {"choices": []})
        elif fault == 4:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')  # ends in the middle
            self.close_connection = True
        else:
            self._caption(body)

    def _caption(self, body: dict[str, Any]) -> None:
        part = body["messages"][0]["content"][0]
        url = part[part["type"]]["url"]
        data = base64.b64decode(url.partition(",")[2])
        text = f"{part['type']} of {len(data)} bytes"
        if part["type"] == "image_url":
            image = Image.open(io.BytesIO(data)).convert("RGB")
            text = f"{image.size} {image.resize((1, 1)).getpixel((0, 0))}"
        with self.server.lock:
            self.server.answered.append(text)
        message = {"role": "assistant", "content": text, "reasoning_content": "Hm."}
        usage = {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self._send(200, {"choices": [choice], "usage": usage, "system_fingerprint": "fp_1"})

    def _send(self, status: int, content: Any, retry_after: str | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if retry_after:
            self.send_header("Retry-After", retry_after)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setattr(remote, "_FIRST_WAIT", 0.01)
    with Endpoint() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def flags(endpoint: Endpoint) -> list[str]:
    url = f"http://127.0.0.1:{endpoint.server_port}/v1"
    return ["--base-url", url, "--model", "kimi-k3", "--api-key", "secret"]


def test_random_failures_lose_nothing(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.faults = 0.4
    pictures(tmp_path / "in", 120)
    (tmp_path / "in" / "bad.png").write_bytes(b"nothing")
    output = tmp_path / "o.jsonl"
    result = run(tmp_path / "in", "--output", output, "--retries=30", *flags(endpoint))
    assert result.exit_code == 2
    found = rows(output)
    assert [Path(row["path"]).name for row in found] == [
        *[f"{number:05d}.png" for number in range(120)],
        "bad.png",
    ]
    for number, row in enumerate(found[:-1]):
        assert row["caption"] == f"(20, 20) ({number}, 0, 77)"
    assert len(endpoint.bodies) > 150, "there were failures"
    assert len(endpoint.answered) == 120
    assert set(endpoint.keys) == {"Bearer secret"}
    assert "secret" not in output.read_text() + (tmp_path / "o.jsonl.journal").read_text()


def test_rows_tell_what_the_endpoint_told(endpoint: Endpoint, tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    result = run(tmp_path, "--json", "--reasoning", "--temperature=0.5", *flags(endpoint))
    row = json.loads(result.stdout)
    assert (row["reasoning"], row["revision"], row["model"]) == ("Hm.", "fp_1", "kimi-k3")
    assert row["usage"]["completion_tokens"] == 5
    assert row["usage"]["image_tokens"] == 1, "by our own plan"
    (body,) = endpoint.bodies
    assert (body["model"], body["temperature"], body["seed"]) == ("kimi-k3", 0.5, row["seed"])


def test_pictures_arrive_upright(endpoint: Endpoint, tmp_path: Path) -> None:
    image = Image.new("RGB", (40, 20), "red")
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.jpg", exif=exif)
    Image.new("CMYK", (30, 20), (0, 255, 255, 0)).save(tmp_path / "print.tif")
    result = run(tmp_path, "--json", *flags(endpoint))
    captions = [json.loads(line)["caption"] for line in result.stdout.splitlines()]
    assert captions[0].startswith("(30, 20) (25")
    assert captions[1].startswith("(20, 40) (25")


def test_requests_run_side_by_side(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.delay = 0.1
    pictures(tmp_path, 20)
    begin = time.monotonic()
    assert run(tmp_path, "--concurrency=10", *flags(endpoint)).exit_code == 0
    assert time.monotonic() - begin < 1.5
    assert 2 < endpoint.most_busy <= 10


def test_what_is_refused_is_not_tried_again(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.status = 400
    picture(tmp_path / "a.png")
    row = json.loads(run(tmp_path, "--json", *flags(endpoint)).stdout)
    assert row["code"] == "http_400"
    assert row["error"].endswith("HTTP 400: not like this")
    assert len(endpoint.bodies) == 1


def test_an_endpoint_that_stays_down_is_a_failure_to_retry(endpoint, tmp_path: Path) -> None:
    endpoint.status = 503
    picture(tmp_path / "a.png")
    output = tmp_path / "o.jsonl"
    command = (tmp_path / "a.png", "--output", output, "--retries=2", *flags(endpoint))
    assert run(*command).exit_code == 2
    assert rows(output)[0]["error"] == "no answer after 3 attempts: HTTP 503"
    assert rows(output)[0]["error_class"] == "engine"
    endpoint.status = None
    assert run(*command, "--retry-failed").exit_code == 0
    assert "caption" in rows(output)[0]


def test_a_slow_endpoint_and_a_time_limit(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.delay = 2.0
    picture(tmp_path / "a.png")
    begin = time.monotonic()
    row = json.loads(run(tmp_path, "--json", "--item-seconds=0.3", *flags(endpoint)).stdout)
    assert time.monotonic() - begin < 1.5
    assert row["code"] == "item_timeout"


def test_a_wrong_endpoint_is_found_first(endpoint: Endpoint, tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    wrong = run(tmp_path, *flags(endpoint), "--model=other")
    assert wrong.exit_code == 1
    assert "no model 'other'; there are kimi-k3" in wrong.stderr
    closed = run(tmp_path, "--base-url", "http://127.0.0.1:9/v1")
    assert (closed.exit_code, closed.stderr.count("\n")) == (1, 1)
    assert "no answer" in closed.stderr
    assert run(tmp_path, "--base-url", "ftp://x").exit_code == 1
    assert endpoint.bodies == []
