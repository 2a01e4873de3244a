"""``benchmarks/sglang_media.py`` between two processes that behave like SGLang."""

from __future__ import annotations

import io
import json
import signal
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from benchmarks import sglang_media

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

FAKE = """
import http.server, json, os, sys

NAME = "plugin" if os.environ["SGLANG_PLUGINS"].endswith("k3vl") else "plain"
FAILS = os.environ["FAILS"].split(",")
if f"{NAME} start" in FAILS:
    sys.exit("no memory")


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(200, {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = body["messages"][0]["content"][0]["type"].removesuffix("_url")
        if f"{NAME} {kind}" in FAILS:
            print("out of resources", flush=True)
            os._exit(1)
        self.reply(200, {"usage": {"prompt_tokens": 7}})

    def reply(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


Measure: TypeAlias = "Callable[[str], tuple[object, Mapping[str, Any]]]"


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Measure]:
    """A small run, in which some fail: its exit status and record."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(FAKE)
    output = tmp_path / "record.json"
    line = ["sglang_media.py", "--model", "some/model", "--output", str(output)]
    line += ["--logs", str(tmp_path), "--size", "112x56", "--frames", "4"]
    line += ["--requests", "3", "--rounds", "2", "--start-seconds", "300"]
    monkeypatch.setattr(sys, "argv", line)
    monkeypatch.setattr(sglang_media, "version", lambda name: f"some {name}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(fails: str) -> tuple[object, Mapping[str, Any]]:
        monkeypatch.setenv("FAILS", fails)
        with pytest.raises(SystemExit) as ended:
            sglang_media.main()
        return ended.value.code, json.loads(output.read_text())

    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)


def rounds(record: Mapping[str, Any], kind: str) -> set[tuple[str, int]]:
    return {(row["server"], row["round"]) for row in record[kind]["rounds"]}


def test_both_answer_and_are_compared(measure: Measure) -> None:
    status, record = measure("")
    assert (status, record["errors"]) == (False, {})
    everybody = [("plain", "image"), ("plugin", "image"), ("plugin", "video")]
    assert [(row["server"], row["kind"]) for row in record["answers"]] == everybody
    assert rounds(record, "image") == {(n, i) for n in ("plain", "plugin") for i in (1, 2)}
    assert rounds(record, "video") == {("plugin", 1), ("plugin", 2)}
    best = record["image"]["best_requests_per_second"]
    assert record["image"]["plugin_to_plain"] == pytest.approx(best["plugin"] / best["plain"], 0.01)
    assert {"start plain", "start plugin", "first video, plugin"} <= record["seconds"].keys()


@pytest.mark.parametrize(
    ("fails", "error", "reason", "left"),
    [
        ("plain start", "plain", "no memory", {("plugin", 1), ("plugin", 2)}),
        ("plain image", "image, plain", "out of resources", {("plugin", 1), ("plugin", 2)}),
        (
            "plugin video",
            "video, plugin",
            "out of resources",
            {("plain", 1), ("plain", 2)},
        ),
    ],
)
def test_one_that_fails_leaves_what_the_other_says(
    measure: Measure, fails: str, error: str, reason: str, left: set[tuple[str, int]]
) -> None:
    status, record = measure(fails)
    assert status
    assert reason in record["errors"][error]
    assert rounds(record, "image") == left
    assert "plugin_to_plain" not in record["image"]


def test_frames_of_a_clip_differ() -> None:
    av = pytest.importorskip("av")
    with av.open(io.BytesIO(sglang_media.clip(3, 112, 56, 5))) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert [frame.shape for frame in frames] == [(56, 112, 3)] * 5
    assert all(abs(a.astype(float) - b).mean() > 1 for a, b in pairwise(frames))
