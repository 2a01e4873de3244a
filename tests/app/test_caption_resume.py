"""Captions are never lost and never made twice: the journal, kills, policies, failures."""

from __future__ import annotations

import csv
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from k3vl.app.captioning.items import make_key
from k3vl.app.captioning.journal import Journal
from tests.app.captioning_kit import EchoBackend, picture, pictures, rows, run, use_echo

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def echo(monkeypatch) -> EchoBackend:
    return use_echo(monkeypatch)


# ------------------------------------------------------------------ kill -9


def start(*args: object, seconds: float = 0.03) -> subprocess.Popen:
    """``seconds``: for an answer. A slow one is under way whenever the test comes to end it."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.app.caption_driver", "caption", *map(str, args)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "ECHO_SECONDS": str(seconds)},
    )


def test_twenty_kills_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    folder, count = tmp_path / "in", 400
    pictures(folder, count)
    for number in range(0, count, 2):
        (folder / f"{number:05d}.txt").write_text("old\n")
    (folder / "bad.png").write_bytes(b"no picture")
    outputs = [tmp_path / f"out.{ending}" for ending in ("jsonl", "tar", "csv")]
    args = [folder, "--quiet", "--sidecar=txt", "--on-existing=append", "--concurrency=4"]
    args += [f"--output={path}" for path in outputs]
    rng = random.Random(7)
    kills = 0
    for _ in range(40):
        with start(*args, seconds=rng.choice((0.03, 0.1, 0.2))) as process:
            process.stdout.readline()  # the first caption of this process
            time.sleep(rng.uniform(0.0, 0.12))
            process.send_signal(signal.SIGKILL)
            kills += process.wait() == -signal.SIGKILL
        if kills == 20:
            break
    assert kills == 20
    partial = len(rows(outputs[0])) if outputs[0].exists() else 0
    assert 20 < partial < count, "the kills hit a run that was under way"

    with start(*args) as process:
        process.communicate(timeout=300)
        assert process.returncode == 2
    found = rows(outputs[0])
    names = [str(folder / f"{number:05d}.png") for number in range(count)]
    assert [row["id"] for row in found] == [*names, str(folder / "bad.png")]
    captions = {row["id"]: row["caption"] for row in found if "caption" in row}
    assert len(set(captions.values())) == count, "each picture has its own"
    for number, name in enumerate(names):
        text = Path(name).with_suffix(".txt").read_text()
        assert text == ("old\n" if number % 2 == 0 else "") + captions[name] + "\n"
    with tarfile.open(outputs[1]) as tar:
        members = tar.getnames()
        texts = [tar.extractfile(name).read().decode() for name in members if name[-4:] == ".txt"]
    assert len(members) == len(set(members)) == 3 * count
    assert sorted(texts) == sorted(captions.values())
    assert outputs[2].read_text().count("\n") == count + 2
    assert not [name for name in os.listdir(folder) if "partial" in name]


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    folder, output = tmp_path / "in", tmp_path / "out.csv"
    pictures(folder, 60)
    args = [folder, "--quiet", "--output", output, "--concurrency=2"]
    with start(*args, seconds=0.5) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        assert (process.returncode, error) == (130, b"interrupted\n")
    first = output.read_text().count("\n") - 1
    assert 0 < first < 60, "the table holds what was done"
    with start(*args) as process:
        captions, _ = process.communicate(timeout=60)
        assert process.returncode == 0
    assert captions.count(b"\n") == 60 - first, "the rest, and nothing twice"
    with output.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert len({row["caption"] for row in found}) == len(found) == 60


def test_a_journal_cut_at_every_byte_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path, {}, "skip") as journal:
        journal.begin()
        for number in range(3):
            journal.add(f"{number}", "p", {"id": f"{number}", "caption": "\u00e4\u2028"}, {})
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        with Journal(path, {}, "skip") as journal:
            expected = max(sum(end <= cut for end in ends) - 1, 0)
            assert len(journal) == expected
            journal.add("new", "p", {"id": "new", "caption": "x"}, {})
        with Journal(path, {}, "skip") as journal:
            assert len(journal) == expected + 1
            assert journal.row(make_key("new", "p")) == {"id": "new", "caption": "x"}


def test_a_journal_belongs_to_one_process(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    journal = tmp_path / "out.jsonl.journal"
    with journal.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        result = run(tmp_path, "--output", tmp_path / "out.jsonl")
    assert result.exit_code == 1
    assert "another run is using this journal" in result.stderr


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet", "tar", "html"])
def test_a_full_disk_is_one_line_and_the_run_goes_on_later(ending: str, tmp_path: Path) -> None:
    """No file may grow beyond 20 KiB, which fails in the places where a full disk does."""
    pictures(tmp_path / "in", 80)
    output, journal = tmp_path / f"out.{ending}", tmp_path / "journal"
    args = [tmp_path / "in", "--quiet", "--report" if ending == "html" else "--output", output]
    args += [] if ending == "html" else ["--journal", journal]
    command = [sys.executable, "-m", "tests.app.caption_driver", "caption", *map(str, args)]
    failed = subprocess.run(
        ["bash", "-c", 'ulimit -S -f 20; exec "$@"', "bash", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "ECHO_SECONDS": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert failed.returncode == 1
    places = [f"Error: {path}: cannot be written (File too large)\n" for path in (output, journal)]
    assert failed.stderr in places
    assert run(*args).exit_code == 0
    assert output.exists()
    if ending == "jsonl":
        assert len(rows(output)) == len({row["id"] for row in rows(output)}) == 80
    elif ending == "tar":
        with tarfile.open(output) as tar:
            assert len(tar.getnames()) == 3 * 80


# ------------------------------------------------------------------ captions that exist


def test_a_second_run_makes_only_what_is_new(tmp_path: Path, echo: EchoBackend) -> None:
    folder, output = tmp_path / "in", tmp_path / "out.jsonl"
    pictures(folder, 3)
    run(folder, "--output", output)
    first = output.read_bytes()
    result = run(folder, "--output", output)
    assert (result.exit_code, result.stdout, output.read_bytes()) == (0, "", first)
    assert "3 captions were there" in result.stderr
    picture(folder / "new.png", 99)
    assert run(folder, "--output", output).stdout.startswith(str(folder / "new.png"))
    assert output.read_bytes().startswith(first)
    assert len(echo.digests) == 4


def test_rows_of_a_time_without_a_journal_are_kept(tmp_path: Path, echo: EchoBackend) -> None:
    paths = pictures(tmp_path / "in", 2)
    output = tmp_path / "out.jsonl"
    old = {"path": str(paths[0]), "caption": "By hand."}
    output.write_text(json.dumps(old) + '\n{"path": "torn')
    run(tmp_path / "in", "--output", output)
    assert rows(output)[0] == old
    assert [row["path"] for row in rows(output)] == [str(path) for path in paths]
    assert len(echo.digests) == 1


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("skip", "old\n"),
        ("overwrite", "{}\n"),
        ("append", "old\n{}\n"),
        ("prepend", "{}\nold\n"),
    ],
)
def test_what_is_done_with_a_sidecar(policy: str, expected: str, tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png")
    sidecar = path.with_suffix(".txt")
    sidecar.write_text("old\n")
    result = run(path, "--sidecar=txt", f"--on-existing={policy}", "--json")
    caption = json.loads(result.stdout)["caption"] if result.stdout else ""
    assert sidecar.read_text() == expected.format(caption)
    assert result.exit_code == 0


def test_existing_captions_can_be_an_error(tmp_path: Path, echo: EchoBackend) -> None:
    path = picture(tmp_path / "a.png")
    assert run(path, "--sidecar=txt", "--on-existing=error").exit_code == 0
    result = run(path, "--sidecar=txt", "--on-existing=error")
    assert result.exit_code == 1
    assert "1 captions exist already" in result.stderr
    assert len(echo.digests) == 1


def test_overwriting_replaces_rows(tmp_path: Path, monkeypatch) -> None:
    paths, output = pictures(tmp_path / "in", 3), tmp_path / "out.jsonl"
    run(tmp_path / "in", "--output", output)
    use_echo(monkeypatch, EchoBackend(reply=lambda _: "New."))
    run(paths[1], "--output", output, "--on-existing=overwrite")
    found = rows(output)
    assert sorted(row["path"] for row in found) == [str(path) for path in paths]
    assert [row["caption"] == "New." for row in found].count(True) == 1


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet", "tar"])
@pytest.mark.parametrize("policy", ["skip", "overwrite", "append", "prepend"])
def test_every_policy_leaves_one_row_of_each_item(ending, policy, tmp_path: Path, monkeypatch):
    """What is not in the second run stays; what is made again takes the place of the old."""
    folder, output = tmp_path / "in", tmp_path / f"out.{ending}"
    paths = pictures(folder, 3)
    flags = ("--output", output, f"--on-existing={policy}")
    assert run(folder, *flags).exit_code == 0
    use_echo(monkeypatch, EchoBackend(reply=lambda _: "New."))
    new = picture(folder / "new.png", 99)
    assert run(paths[1], new, *flags).exit_code == 0
    captions = {Path(row["path"]).name: row["caption"] for row in held(output)}
    assert len(held(output)) == len(captions) == 4
    again = "Picture" if policy == "skip" else "New."
    assert [captions[path.name].split(" ")[0] for path in paths] == ["Picture", again, "Picture"]
    assert captions["new.png"] == "New."
    assert not [name for name in os.listdir(tmp_path) if "partial" in name]


def held(output: Path) -> list[dict]:
    """The rows in an output of any kind; of a shard's samples with all of their parts."""
    if output.suffix == ".jsonl":
        return rows(output)
    if output.suffix == ".csv":
        with output.open(newline="") as file:
            return list(csv.DictReader(file))
    if output.suffix == ".parquet":
        return pq.read_table(output).to_pylist()
    with tarfile.open(output) as tar:
        names = tar.getnames()
        assert len(names) == len(set(names))
        found = [json.load(tar.extractfile(name)) for name in names if name.endswith(".json")]
        assert len(names) == 3 * len(found)
        return found


def test_an_output_that_nobody_knows_is_left_alone(tmp_path: Path) -> None:
    path, output = picture(tmp_path / "a.png"), tmp_path / "out.csv"
    output.write_text("mine")
    result = run(path, "--output", output)
    assert result.exit_code == 1
    assert "no journal tells what is in it" in result.stderr
    assert output.read_text() == "mine"


@pytest.mark.parametrize(
    "content",
    [
        '{"path": "b.png", "label": 3}\n',
        "a line\n",
        '[1]\n{"path": "a", "caption": "b"}\n',
        "{}\n{",
    ],
)
def test_lines_that_are_no_captions_are_left_alone(content: str, tmp_path: Path) -> None:
    path, output = picture(tmp_path / "a.png"), tmp_path / "out.jsonl"
    output.write_text(content)
    result = run(path, "--output", output)
    assert result.exit_code == 1
    assert "holds lines that are no captions" in result.stderr
    assert output.read_text() == content
    assert sorted(os.listdir(tmp_path)) == ["a.png", "out.jsonl"]


def test_a_last_line_without_its_end_is_kept_where_it_is_whole(tmp_path: Path, echo) -> None:
    paths, output = pictures(tmp_path / "in", 2), tmp_path / "out.jsonl"
    output.write_text(json.dumps({"path": str(paths[0]), "caption": "By hand."}))
    assert run(tmp_path / "in", "--output", output).exit_code == 0
    assert rows(output)[0]["caption"] == "By hand."
    assert len(rows(output)) == 2
    assert len(echo.digests) == 1


@pytest.mark.parametrize("name", ["in.jsonl", "in.csv", "in.parquet", "in.tar"])
@pytest.mark.parametrize("flag", ["--output", "--report", "--journal"])
def test_an_input_is_never_written(name: str, flag: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = tmp_path / name
    table.write_text('{"path": "a.png", "caption": "old"}\n')
    link = tmp_path / f"link{table.suffix}"
    link.symlink_to(table)
    before = table.read_bytes()
    for given, written in ((name, name), (name, table), (name, link), ("-", name)):
        stdin = f"{name}\n" if given == "-" else None
        result = run(given, flag, written, "--on-existing=overwrite", stdin=stdin)
        assert (result.exit_code, result.stdout) == (1, "")
        assert f"{flag} {written}: is an input" in result.stderr
        assert table.read_bytes() == before


def test_one_file_is_not_written_twice(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    picture(tmp_path / "a.png")
    for flags in (
        ("--output=o.jsonl", "--output=./o.jsonl"),
        ("--output=o.jsonl", "--report=o.jsonl"),
        ("--output=o.jsonl", "--journal=o.jsonl"),
        ("--output=o.jsonl", "--report=o.jsonl.journal"),
    ):
        result = run(tmp_path, *flags)
        assert result.exit_code == 1, flags
        assert "the same file is given twice" in result.stderr


def test_outputs_that_are_asked_for_later_get_everything(tmp_path: Path, echo) -> None:
    folder = tmp_path / "in"
    pictures(folder, 3)
    run(folder, "--output", tmp_path / "out.jsonl")
    run(folder, "--output", tmp_path / "out.jsonl", "--output", tmp_path / "x.tar", "--sidecar=txt")
    assert len(echo.digests) == 3
    assert len(list(folder.glob("*.txt"))) == 3
    with tarfile.open(tmp_path / "x.tar") as tar:
        assert len(tar.getnames()) == 9


def test_other_settings_are_told(tmp_path: Path) -> None:
    path, output = picture(tmp_path / "a.png"), tmp_path / "out.jsonl"
    run(path, "--output", output)
    result = run(path, "--output", output, "--max-tokens=5")
    assert "not as in the last run: sampling; captions that exist are kept" in result.stderr


# ------------------------------------------------------------------ failures


def test_failures_are_known_whatever_sidecars_exist(tmp_path: Path) -> None:
    """A failed file with an old sidecar is tried again, and its old caption is not lost."""
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"")
    bad.with_suffix(".txt").write_text("old\n")
    picture(tmp_path / "good.png")
    flags = (tmp_path, "--sidecar=txt")
    first = run(*flags, "--on-existing=overwrite")
    assert first.exit_code == 2
    assert "bad.png: error: " in first.stderr
    assert bad.with_suffix(".txt").read_text() == "old\n"

    again = run(*flags)
    assert again.exit_code == 2, "what failed before still has no caption"
    assert "1 failed before; --retry-failed" in again.stderr

    picture(bad, 5)
    retried = run(*flags, "--retry-failed")
    assert retried.exit_code == 0
    assert retried.stdout.startswith(str(bad))
    assert bad.with_suffix(".txt").read_text().startswith("Picture ")
    assert run(*flags).exit_code == 0


def test_a_caption_takes_the_place_of_its_error(tmp_path: Path) -> None:
    bad, output = tmp_path / "bad.png", tmp_path / "out.jsonl"
    bad.write_bytes(b"nothing")
    assert run(bad, "--output", output).exit_code == 2
    assert rows(output)[0]["error_class"] == "media"
    picture(bad)
    assert run(bad, "--output", output, "--retry-failed").exit_code == 0
    assert ["caption" in row for row in rows(output)] == [True]


def test_strict_and_max_errors(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"{number}.png").write_bytes(b"nothing")
    strict = run(tmp_path, "--strict")
    assert (strict.exit_code, strict.stderr.count(": error: ")) == (2, 1)
    assert "stopped after 1 errors" in strict.stderr
    some = run(tmp_path, "--max-errors=2")
    assert (some.exit_code, some.stderr.count(": error: ")) == (2, 3)
    assert run(tmp_path, "--max-errors=6").stderr.count(": error: ") == 6


def test_an_item_has_a_time_limit(tmp_path: Path, monkeypatch) -> None:
    slow = use_echo(monkeypatch, EchoBackend(seconds=60))
    picture(tmp_path / "a.png")
    begin = time.monotonic()
    result = run(tmp_path, "--item-seconds=0.3", "--json")
    assert time.monotonic() - begin < 30, "less than the answer takes"
    assert json.loads(result.stdout)["code"] == "item_timeout"
    assert slow.cancelled == [1]


def test_an_unforeseen_exception_is_one_items_error(tmp_path: Path, monkeypatch) -> None:
    def reply(text: str) -> str:
        raise ZeroDivisionError(text)

    use_echo(monkeypatch, EchoBackend(reply=reply))
    picture(tmp_path / "a.png")
    result = run(tmp_path)
    assert result.exit_code == 2
    assert "a.png: error: unexpected ZeroDivisionError" in result.stderr


# ------------------------------------------------------------------ before the run


def test_names_that_would_share_a_sidecar_are_found_first(tmp_path: Path, echo) -> None:
    picture(tmp_path / "a.png", 1)
    picture(tmp_path / "a.jpg", 2)
    picture(tmp_path / "b.jpg", 3)
    result = run(tmp_path, "--sidecar=txt")
    assert result.exit_code == 1
    assert f"{tmp_path / 'a.jpg'} and {tmp_path / 'a.png'}" in result.stderr
    assert echo.digests == []
    assert sorted(os.listdir(tmp_path)) == ["a.jpg", "a.png", "b.jpg"], "nothing was touched"
    assert run(tmp_path, "--sidecar=txt", "--sidecar-name=full").exit_code == 0
    assert (tmp_path / "a.png.txt").read_text() != (tmp_path / "a.jpg.txt").read_text()
    assert run(tmp_path, "--output", tmp_path / "o.jsonl").exit_code == 0, "no sidecars, no matter"


def test_a_dry_run_tells_and_touches_nothing(tmp_path: Path, echo: EchoBackend) -> None:
    folder = tmp_path / "in"
    picture(folder / "wide.png", 1, (56, 28))
    turned = Image.new("RGB", (28, 560), "red")
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(folder / "turned.jpg", exif=exif)
    picture(folder / "turned.png", 2, (28, 28))
    (folder / "bad.png").write_bytes(b"")
    before = sorted(os.listdir(folder))
    args = (folder, "--sidecar=txt", "--output", tmp_path / "o.jsonl", "--dry-run")
    record = json.loads(run(*args, "--json").stdout)
    assert (record["captions"], record["pictures"], record["unreadable"]) == (4, 3, 1)
    assert record["media_tokens"] == sum(
        row["usage"]["image_tokens"]
        for row in map(json.loads, run(folder, "--json").stdout.splitlines())
        if "usage" in row
    )
    assert record["collisions"] == [[str(folder / "turned.jpg"), str(folder / "turned.png")]]
    assert record["seconds_measured_on"] == "a trial"
    assert "captions to make: 4 (3 pictures, 0 clips)" in run(*args).stdout
    assert sorted(os.listdir(folder)) == before
    assert sorted(os.listdir(tmp_path)) == ["in"]
