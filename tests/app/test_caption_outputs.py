"""What is written: rows in every form, read back by the libraries that others read them with."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import webdataset
from PIL import Image

from k3vl.app.captioning.rows import COLUMNS
from tests.app.captioning_kit import EchoBackend, picture, pictures, rows, run, use_echo


@pytest.fixture(autouse=True)
def echo(monkeypatch) -> EchoBackend:
    return use_echo(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    pictures(folder, 3)
    picture(folder / "wide.jpg", 9, (57, 30))
    (folder / "zero.png").write_bytes(b"")
    return folder


def test_a_row_says_everything(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "o.jsonl"
    begun = time.monotonic()
    run(folder, "--output", output, "--temperature=0.7", "--seed=5", "--reasoning")
    seconds = time.monotonic() - begun
    found = {Path(row["path"]).name: row for row in rows(output)}
    wide = found["wide.jpg"]
    assert (wide["kind"], wide["width"], wide["height"]) == ("image", 57, 30)
    assert wide["digest"] == hashlib.sha256((folder / "wide.jpg").read_bytes()).hexdigest()
    assert (wide["prompt_id"], wide["prompt"]) == ("default", "Describe the image.")
    assert wide["usage"]["image_tokens"] == 6
    assert wide["usage"]["completion_tokens"] > 1
    assert (wide["model"], len(wide["revision"])) == ("demo", 12)
    assert wide["params"]["temperature"] == 0.7
    assert wide["seed"] != found["00000.png"]["seed"]
    assert (wide["finish"], wide["reasoning"], wide["frames"]) == ("stop", "", 1)
    assert 0 < wide["latency"] < seconds
    zero = found["zero.png"]
    assert (zero["code"], zero["error_class"]) == ("image_empty", "media")


def test_several_outputs_agree(folder: Path, tmp_path: Path) -> None:
    names = ("o.jsonl", "o.csv", "o.parquet")
    flags = [f"--output={tmp_path / name}" for name in names]
    result = run(folder, *flags, "--json")
    assert result.exit_code == 2
    expected = rows(tmp_path / "o.jsonl")
    assert [json.loads(line) for line in result.stdout.splitlines()] == expected

    table = pq.read_table(tmp_path / "o.parquet")
    assert table.column_names == list(COLUMNS)
    frame = pd.read_parquet(tmp_path / "o.parquet")
    text = pd.read_csv(tmp_path / "o.csv")
    assert list(text.columns) == list(COLUMNS)
    for number, row in enumerate(expected):
        for name in ("id", "digest", "code"):
            value = row.get(name)
            assert (None if pd.isna(frame[name][number]) else frame[name][number]) == value
            assert (None if pd.isna(text[name][number]) else text[name][number]) == value
        if "caption" in row:
            assert frame["caption"][number] == text["caption"][number] == row["caption"]
            assert frame["usage_image_tokens"][number] == row["usage"]["image_tokens"]
            assert json.loads(text["params"][number]) == row["params"]
            assert list(frame["warnings"][number]) == row["warnings"]


# The package's own readers leave files open.
leaves_files_open = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@leaves_files_open
def test_webdataset_reads_the_shard(folder: Path, tmp_path: Path) -> None:
    shard, output = tmp_path / "o.tar", tmp_path / "o.jsonl"
    run(folder, "--output", output, "--output", shard)
    samples = list(webdataset.WebDataset(str(shard), shardshuffle=False).decode("pil"))
    expected = [row for row in rows(output) if "caption" in row]
    assert [sample["json"] for sample in samples] == expected
    assert [sample["txt"] for sample in samples] == [row["caption"] for row in expected]
    for sample, row in zip(samples, expected, strict=True):
        image = sample.get("png") or sample.get("jpg")
        assert image.size == (row["width"], row["height"])


@leaves_files_open
def test_a_shard_in_and_a_shard_out(folder: Path, tmp_path: Path) -> None:
    run(folder, "--output", tmp_path / "a.tar")
    result = run(tmp_path / "a.tar", "--output", tmp_path / "b.tar", "--prompt=Was: {caption}")
    assert result.exit_code == 0
    first = webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False)
    second = webdataset.WebDataset(str(tmp_path / "b.tar"), shardshuffle=False)
    for a, b in zip(first, second, strict=True):
        assert a["txt"] == b["txt"], "the fake names the picture alone"
        row = json.loads(b["json"])
        assert row["prompt"] == f"Was: {a['txt'].decode()}"
        assert row["id"] == f"{tmp_path / 'a.tar'}/{a['__key__']}"


def test_kinds_of_output_by_ending_or_by_flag(folder: Path, tmp_path: Path) -> None:
    plain, table = tmp_path / "plain.txt", tmp_path / "table.txt"
    run(folder, "--output", plain)
    run(folder, "--output", table, "--output-format=csv")
    assert len(rows(plain)) == 5
    with table.open(newline="") as file:
        assert [row["id"] for row in csv.DictReader(file)] == [row["id"] for row in rows(plain)]


def test_sidecars_of_every_kind_at_once(folder: Path, tmp_path: Path) -> None:
    flags = [f"--sidecar={kind}" for kind in ("txt", "caption", "json")]
    run(folder, *flags, "--output", tmp_path / "o.jsonl")
    for row in rows(tmp_path / "o.jsonl"):
        path = Path(row["path"])
        if "error" in row:
            assert not path.with_suffix(".txt").exists()
            continue
        assert path.with_suffix(".txt").read_text() == row["caption"] + "\n"
        assert path.with_suffix(".caption").read_text() == row["caption"] + "\n"
        assert json.loads(path.with_suffix(".json").read_text()) == row


def test_a_tree_of_sidecars(tmp_path: Path) -> None:
    picture(tmp_path / "in" / "x" / "a.png", 1)
    picture(tmp_path / "in" / "y" / "a.png", 2)
    result = run(tmp_path / "in", "--sidecar=txt", "--sidecar-dir", tmp_path / "out")
    assert result.exit_code == 0
    found = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*.txt")}
    assert found == {"x/a.txt", "y/a.txt"}


def test_equal_files_are_captioned_once(tmp_path: Path, echo: EchoBackend) -> None:
    data = picture(tmp_path / "in" / "a.png").read_bytes()
    for number in range(20):
        (tmp_path / "in" / f"b{number}.png").write_bytes(data)
    (tmp_path / "in" / "c.png").write_bytes(data[:40])
    run(tmp_path / "in", "--output", tmp_path / "o.jsonl")
    found = rows(tmp_path / "o.jsonl")
    assert len(echo.digests) == 1
    captions = [row for row in found if "caption" in row]
    assert len(captions) == 21
    assert len({row["caption"] for row in captions}) == 1
    assert [row.get("duplicate_of") is None for row in captions].count(True) == 1
    assert found[-1]["code"] == "image_truncated"


def test_progress_for_machines(folder: Path) -> None:
    result = run(folder, "--progress=json")
    records = [json.loads(line) for line in result.stderr.splitlines() if line[0] == "{"]
    last = records[-1]
    assert (last["event"], last["done"], last["total"]) == ("finished", 5, 5)
    assert (last["captioned"], last["failed"], last["eta_seconds"]) == (4, 1, 0.0)
    assert last["rate"] > 0


def test_progress_for_people(folder: Path, tmp_path: Path) -> None:
    """On a terminal: how many, how fast, how long, how many failed; nothing of it with --quiet."""

    def seen(*flags: str) -> str:
        master, terminal = pty.openpty()
        command = [sys.executable, "-m", "tests.app.caption_driver", "caption", folder]
        with subprocess.Popen(
            [*command, "--output", tmp_path / f"{len(flags)}.jsonl", *flags],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=terminal,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        ) as process:
            os.close(terminal)
            shown = b""
            with contextlib.suppress(OSError):  # Linux: the terminal is gone with its last writer
                while data := os.read(master, 65536):
                    shown += data
            os.close(master)
            assert process.wait(60) == 2
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())

    shown = seen()
    assert "captioning" in shown
    assert re.search(r"5/5 \d+\.\d/s \d:\d\d:\d\d 1 failed", shown), shown[-500:]
    quiet = seen("--quiet")
    assert "captioning" not in quiet
    assert "zero.png: error" in quiet


def test_ten_thousand_pictures_in_bounded_memory(tmp_path: Path) -> None:
    """What is held grows by the journal's keys and by the last answers, not by the pictures."""
    base = picture(tmp_path / "base.bmp", size=(60, 60)).read_bytes()
    folder = tmp_path / "in"
    folder.mkdir()
    peaks, made = {}, 0
    for count in (1_000, 10_000):
        for number in range(made, count):
            pixel = number.to_bytes(3, "little")
            (folder / f"{number:06d}.bmp").write_bytes(base[:54] + pixel + base[57:])
        made = count
        output = tmp_path / f"{count}.jsonl"
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, "caption", folder, "--quiet", "--output", output],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            check=True,
        )
        peaks[count] = int(done.stderr)
    with (tmp_path / "10000.jsonl").open() as lines:
        found = [json.loads(line) for line in lines]
    assert len({row["id"] for row in found}) == 10_000
    assert len({row["caption"] for row in found}) == 10_000
    # 9,000 pictures of 11 kB and their patches would be far more than this.
    assert peaks[10_000] - peaks[1_000] < 40_000, f"{peaks} KiB"


ROOT = Path(__file__).resolve().parents[2]
MEASURE = """
import resource, sys
from k3vl.app.cli import cli
from tests.app import caption_driver
from tests.app.captioning_kit import EchoBackend, echo_pipeline

class Forgetful(EchoBackend):
    def submit(self, *args):
        self.digests = self.prompts = self.samplings = self.cancelled = []
        return super().submit(*args)

caption_driver.caption_module.Pipeline.load = lambda name, **_: echo_pipeline(Forgetful())
try:
    cli(prog_name="k3vl")
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


@leaves_files_open
def test_pictures_keep_their_names_in_a_shard(tmp_path: Path) -> None:
    Image.new("RGB", (20, 20), "red").save(tmp_path / "a.b c.png")
    run(tmp_path / "a.b c.png", "--output", tmp_path / "o.tar")
    (sample,) = webdataset.WebDataset(str(tmp_path / "o.tar"), shardshuffle=False)
    assert sample["__key__"].startswith("a-b-c-")
