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

import numpy as np
import pytest
from PIL import Image

from k3vl.app import sent_media
from k3vl.app.captioning import remote
from k3vl.config import K3_MEDIA
from k3vl.types import MediaPart, ProcessedMedia
from k3vl.vision.processor import MediaProcessor, model_view
from tests.app.captioning_kit import (
    EchoBackend,
    echo_pipeline,
    film,
    picture,
    pictures,
    rows,
    run,
    use_echo,
)
from tests.app.serving import in_thread


class Endpoint(http.server.ThreadingHTTPServer):
    """Answers with the average colour of the picture that it was sent.

    Attributes:
        faults: how many of the requests fail, from 0 to 1.
        bodies, keys: what was asked.
        answered: pictures that were answered, by colour.
        together: requests wait here for each other.
        text, finish: what it says in place of that, and why it ends.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults = 0.0
        self.delay = 0.0
        self.together: threading.Barrier | None = None
        self.status: int | None = None
        self.text, self.finish = "", "stop"
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.answered: list[str] = []
        self.random = random.Random(3)
        self.lock = threading.Lock()
        self.busy = self.most_busy = 0
        self.usage: dict[str, Any] = {"total_tokens": 25}

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
        if server.together is not None:
            server.together.wait(60)
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
        text = self.server.text or text
        with self.server.lock:
            self.server.answered.append(text)
        message = {"role": "assistant", "content": text, "reasoning_content": "Hm."}
        usage = {"prompt_tokens": 20, "completion_tokens": 5, **self.server.usage}
        choice = {"index": 0, "message": message, "finish_reason": self.server.finish}
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


def test_a_clip_that_is_counted_as_pictures_is_counted_once(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    """SGLang has one kind of media tokens."""
    endpoint.usage = {"prompt_tokens_details": {"image_tokens": 9}}
    row = json.loads(run(film(tmp_path / "a.mp4"), "--json", *flags(endpoint)).stdout)
    assert (row["usage"]["image_tokens"], row["usage"]["video_tokens"]) == (9, 0)


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
    """Ten at a time: fewer would wait for each other in vain."""
    endpoint.together = threading.Barrier(10)
    pictures(tmp_path, 20)
    assert run(tmp_path, "--concurrency=10", *flags(endpoint)).exit_code == 0
    assert endpoint.most_busy == 10


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
    endpoint.delay = 60.0
    picture(tmp_path / "a.png")
    begin = time.monotonic()
    row = json.loads(run(tmp_path, "--json", "--item-seconds=0.3", *flags(endpoint)).stdout)
    assert time.monotonic() - begin < 30
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


def test_our_own_server_captions_as_the_embedded_engine(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "in"
    pictures(folder, 8)
    first, *rest = [Image.new("RGB", (40, 30), (80 * n, 0, 99)) for n in range(3)]
    first.save(folder / "doc.tif", save_all=True, append_images=rest)
    flags = (folder, "--json", "--pages=all")
    served = echo_pipeline(EchoBackend())
    with in_thread(served) as (url, _):
        endpoint = ("--base-url", f"{url}/v1", "--model", "demo")
        far = run(*flags, "--sidecar=txt", "--journal", tmp_path / "far", *endpoint)
        path = film(tmp_path / "film.mp4")
        clips = run(path, "--json", "--clip-seconds=2", *endpoint)
    use_echo(monkeypatch)
    near = run(*flags, "--output", tmp_path / "near.jsonl")
    found = [[json.loads(line) for line in each.stdout.splitlines()] for each in (near, far)]
    assert len(found[0]) == 11
    for name in ("id", "caption", "digest", "width", "height", "finish"):
        assert [row[name] for row in found[0]] == [row[name] for row in found[1]]
    tokens = [
        [row["usage"][n] for n in ("prompt_tokens", "image_tokens", "completion_tokens")]
        for row in (*found[0], *found[1])
    ]
    assert tokens[:11] == tokens[11:]
    pieces = [json.loads(line) for line in clips.stdout.splitlines()]
    assert len({row["caption"] for row in pieces}) == 3
    assert all(row["usage"]["video_tokens"] > 0 for row in pieces)


# ------------------------------------------------------------------ clips


def sent(endpoint: Endpoint) -> list[tuple[str, bytes]]:
    """Type and bytes of the media of every request."""
    parts = [body["messages"][0]["content"][0] for body in endpoint.bodies]
    urls = [(part["type"], part[part["type"]]["url"]) for part in parts]
    return [(kind, base64.b64decode(url.partition(",")[2])) for kind, url in urls]


def seen_by_a_server(data: bytes) -> ProcessedMedia:
    return MediaProcessor(K3_MEDIA).process(MediaPart("video", data))


def test_pieces_arrive_as_clips_with_the_frames_that_k3_chooses(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    path = film(tmp_path / "film.mp4")
    result = run(path, "--json", "--clip-seconds=2", "--concurrency=1", *flags(endpoint))
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["id"] for row in rows] == [f"{path}#t={a},{a + 2}" for a in (0, 2, 4)]
    for number, (row, (kind, data)) in enumerate(zip(rows, sent(endpoint), strict=True)):
        assert kind == "video_url"
        media = seen_by_a_server(data)
        times = row["frame_times"]
        assert media.frame_times == pytest.approx([at - times[0] for at in times], abs=2e-3)
        assert sum(item.num_tokens for item in media.items) == row["usage"]["video_tokens"]
        greys = [int(np.asarray(view.convert("L")).max()) for view in model_view(media)]
        expected = [40 * int(at) + 20 for at in times]
        assert greys == pytest.approx(expected, abs=3), f"piece {number}"


def test_an_animation_arrives_as_a_clip(endpoint: Endpoint, tmp_path: Path) -> None:
    frames = [Image.new("RGB", (41, 29), (80 * n, 0, 99)) for n in range(3)]
    first, *rest = frames
    first.save(tmp_path / "moves.gif", save_all=True, append_images=rest, duration=500)
    clear = [Image.new("RGBA", (40, 30), (0, 80 * n, 99, 0)) for n in range(3)]
    clear[0].save(tmp_path / "clear.png", save_all=True, append_images=clear[1:], duration=500)
    result = run(tmp_path, "--json", "--pages=clip", "--concurrency=1", *flags(endpoint))
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    (clear_kind, clear_data), (kind, data) = sent(endpoint)
    assert (clear_kind, kind) == ("video_url", "video_url")
    media = seen_by_a_server(data)
    assert media.frame_times == pytest.approx(rows[1]["frame_times"])
    assert [view.getpixel((9, 9))[0] for view in model_view(media)] == pytest.approx(
        [0, 80, 160], abs=8
    )
    levels = np.asarray(model_view(seen_by_a_server(clear_data))[0])[:28, :28, 0]
    assert levels.min() < 200 < levels.max(), "over the chessboard, as K3 sees it"


def test_a_page_arrives_by_itself(endpoint: Endpoint, tmp_path: Path) -> None:
    first, *rest = [Image.new("RGB", (40, 30), (80 * n, 0, 99)) for n in range(3)]
    first.save(tmp_path / "doc.tif", save_all=True, append_images=rest)
    result = run(tmp_path, "--json", "--pages=2-", *flags(endpoint))
    captions = [json.loads(line)["caption"] for line in result.stdout.splitlines()]
    assert captions == ["(40, 30) (80, 0, 99)", "(40, 30) (160, 0, 99)"]


def test_a_clip_that_is_too_large_is_said(endpoint: Endpoint, tmp_path: Path, monkeypatch) -> None:
    path = film(tmp_path / "film.mp4")
    monkeypatch.setattr(sent_media, "MAX_VIDEO_BYTES", 100)
    row = json.loads(run(path, "--json", *flags(endpoint)).stdout)
    assert row["code"] == "media_too_large"
    assert row["error_class"] == "media"
    assert run(path, "--clip-seconds=2", *flags(endpoint)).exit_code == 0


# ------------------------------------------------------------------ JSON


SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer"}},
    "required": ["colour", "count"],
}


def test_a_schema_is_asked_for_and_what_breaks_it_is_an_error(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    command = (tmp_path / "a.png", "--json", "--json-schema", tmp_path / "schema.json")
    endpoint.text = '{"count": 2, "colour": "red"}'
    row = json.loads(run(*command, *flags(endpoint)).stdout)
    assert (row["caption"], row["data"]) == (endpoint.text, {"colour": "red", "count": 2})
    wanted = endpoint.bodies[0]["response_format"]
    asked = {**SCHEMA, "additionalProperties": False}
    assert (wanted["type"], wanted["json_schema"]["schema"]) == ("json_schema", asked)
    assert (wanted["json_schema"]["name"], wanted["json_schema"]["strict"]) == ("caption", True)
    for text, reason in [
        ("A red kite.", "the answer is not JSON"),
        ('{"count": 2.5, "colour": "red"}', 'the answer does not fit the schema at $["count"]'),
        ('{"count": 2}', "the answer does not fit the schema at $"),
    ]:
        endpoint.text = text
        result = run(*command, *flags(endpoint))
        row = json.loads(result.stdout)
        assert (result.exit_code, row["code"], row["error"]) == (2, "schema_unmet", reason)
        assert "data" not in row
    endpoint.text, endpoint.finish = '{"count": 2, "col', "length"
    assert "--max-tokens" in json.loads(run(*command, *flags(endpoint)).stdout)["error"]
