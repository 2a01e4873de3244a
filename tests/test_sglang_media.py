"""``benchmarks/sglang_media.py`` between two processes that behave like SGLang."""

from __future__ import annotations

import io
import json
import signal
import statistics
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
CHARACTERS_PER_TOKEN = int(os.environ["CHARACTERS_PER_TOKEN"])
PREAMBLE = {"plain": 20, "plugin": 325}
if f"{NAME} start" in FAILS:
    sys.exit("no memory")


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(200, {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = body["messages"][0]["content"]
        (kind,) = [p["type"].removesuffix("_url") for p in content if p["type"] != "text"]
        if f"{NAME} {kind}" in FAILS:
            print("out of resources", flush=True)
            os._exit(1)
        if f"{NAME} {kind} 400" in FAILS:
            return self.reply(400, {"message": f"{kind}: no memory for it"})
        characters = sum(len(p["text"]) for p in content if p["type"] == "text")
        tokens = PREAMBLE[NAME] + characters // CHARACTERS_PER_TOKEN
        self.reply(200, {"usage": {"prompt_tokens": tokens}})

    def reply(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


Measure: TypeAlias = "Callable[..., tuple[object, Mapping[str, Any]]]"


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
    line += ["--video-requests", "2", "--video-rounds", "1"]
    monkeypatch.setattr(sys, "argv", line)
    monkeypatch.setattr(sglang_media, "version", lambda name: f"some {name}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(fails: str, characters: int = 1) -> tuple[object, Mapping[str, Any]]:
        monkeypatch.setenv("FAILS", fails)
        monkeypatch.setenv("CHARACTERS_PER_TOKEN", str(characters))
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
    assert rounds(record, "image") == {(n, i) for n in ("plain", "plugin") for i in (0, 1)}
    assert rounds(record, "video") == {("plugin", 0)}
    best = record["image"]["best_requests_per_second"]
    found = record["image"]["plugin_to_plain"]
    assert found["best"] == pytest.approx(best["plugin"] / best["plain"], 0.01)
    assert found["of_rounds"][0] <= found["of_rounds"][1]
    assert {"start plain", "start plugin", "first video, plugin"} <= record["seconds"].keys()


@pytest.mark.parametrize("characters", [1, 4])
def test_both_read_as_many_tokens(measure: Measure, characters: int) -> None:
    _, record = measure("", characters)
    first = {row["server"]: row["prompt_tokens"] for row in record["answers"]}
    assert first["plugin"] - first["plain"] == 305
    assert record["padding"]["server"] == "plain"
    assert record["padding"]["prompt_tokens"] == first["plugin"]
    assert {row["prompt_tokens"] for row in record["image"]["rounds"]} == {first["plugin"]}


def test_a_difference_is_told_with_its_error() -> None:
    speeds = {"plain": [60.0, 64.0, 62.0], "plugin": [60.0, 61.0, 62.0]}
    rows = [
        {"server": name, "round": number, "requests_per_second": speed}
        for name, own in speeds.items()
        for number, speed in enumerate(own)
    ]
    found = sglang_media.summary(rows)
    assert found["median_requests_per_second"] == {"plain": 62.0, "plugin": 61.0}
    assert found["spread"] == {"plain": round(4 / 62, 4), "plugin": round(2 / 61, 4)}
    ratios = [1.0, 61 / 64, 1.0]
    assert found["plugin_to_plain"] == {
        "best": round(62 / 64, 4),
        "median": round(61 / 62, 4),
        "of_rounds": [round(61 / 64, 4), 1.0],
        "standard_error": round(statistics.stdev(ratios) / 3**0.5, 4),
    }


@pytest.mark.parametrize(
    ("fails", "error", "reason", "left"),
    [
        ("plain start", "plain", "no memory", {"plugin"}),
        ("plain image", "image, plain", "out of resources", {"plugin"}),
        ("plugin video", "video, plugin", "out of resources", {"plain", "plugin"}),
        ("plugin video 400", "video, plugin", "no memory for it", {"plain", "plugin"}),
    ],
)
def test_one_that_fails_leaves_what_the_other_says(
    measure: Measure, fails: str, error: str, reason: str, left: set[str]
) -> None:
    """Clips that fail take nothing from the pictures, which were measured before."""
    status, record = measure(fails)
    assert status
    assert reason in record["errors"][error]
    assert rounds(record, "image") == {(name, number) for name in left for number in (0, 1)}
    assert ("plugin_to_plain" in record["image"]) == (len(left) == 2)


def test_frames_of_a_clip_differ() -> None:
    av = pytest.importorskip("av")
    with av.open(io.BytesIO(sglang_media.clip(3, 112, 56, 5))) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert [frame.shape for frame in frames] == [(56, 112, 3)] * 5
    assert all(abs(a.astype(float) - b).mean() > 1 for a, b in pairwise(frames))
