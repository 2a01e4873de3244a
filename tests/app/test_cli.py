"""The command line: output, errors in one line, exit codes."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import psutil
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from k3vl import __version__
from k3vl.app.caption import find_files
from k3vl.app.cli import cli
from k3vl.app.inspect import _unique_stems
from k3vl.app.output import json_line, printable
from k3vl.kernels.choice import choose
from tests.test_config import GOLDEN
from tests.timing import cpu_limit, until


def run(*args: object, stdin: str | None = None):
    result = CliRunner().invoke(cli, [str(arg) for arg in args], input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result


def records(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def bomb(side: int = 40_000) -> bytes:
    """A PNG whose header declares side x side pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    data = zlib.compress(b"\0" * 1000)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    """A folder of files that cannot be captioned."""
    (tmp_path / "text.jpg").write_text("this is text")
    (tmp_path / "zero.png").write_bytes(b"")
    (tmp_path / "huge.png").write_bytes(bomb())
    (tmp_path / "notes.txt").write_text("not a picture, and not taken for one")
    return tmp_path


def test_doctor_says_which_kernels_run_and_why() -> None:
    lines = run("doctor", "--device", "cpu").output.splitlines()
    assert re.fullmatch(r"k3vl \S+, Python \S+, torch \S+", lines[0])
    assert re.fullmatch(r"device: cpu \(\S+\), float32 weights, .* GiB free, \d+ .*", lines[1])
    chosen = choose(torch.device("cpu"), torch.float32)
    assert lines[2:] == [
        f"kernels: {chosen.name}, because {chosen.reason}",
        "experts of an MXFP4 checkpoint: are decoded to float32",
    ]


# ------------------------------------------------------------------ inspect


def test_help_and_version() -> None:
    assert __version__ in run("--version").output
    for command in ((), ("caption",), ("inspect",), ("inspect", "media")):
        assert "Usage: " in run(*command, "--help").output


@pytest.mark.parametrize(
    "args",
    [
        ["nonsense"],
        ["--nonsense"],
        ["caption"],
        ["caption", "a.png", "--nonsense"],
        ["caption", "a.png", "--temperature=99"],
        ["inspect", "plan", "nowhere.jsonl"],
        ["serve", "--port=99999"],
    ],
)
def test_a_wrong_command_is_not_the_exit_code_of_a_finished_run(args) -> None:
    result = run(*args)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "Error: " in result.stderr


def test_help_comes_at_once() -> None:
    """CPU seconds, and the least of several, so that a busy machine does not matter."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    least = float("inf")
    for _ in range(6):
        before = spent()
        subprocess.run([SCRIPT, "--help"], stdout=subprocess.DEVNULL, check=True)
        least = min(least, spent() - before)
        if least < 0.3:
            return
    assert least < 0.3


def test_render_and_parse_records() -> None:
    line = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "options": {}})
    out = records(run("inspect", "render", stdin=line + "\n\nnot json\n{}\n").output)
    assert [sorted(record) for record in out] == [["segments"], ["error"], ["error"]]
    assert out[1] == {"error": "line 3: not JSON"}
    assert {"text": "Hi", "allow_special": False} in out[0]["segments"]

    pieces = [["ok", False], ["<|end_of_msg|>", True]]
    line = json.dumps({"pieces": pieces, "options": {"thinking": False}})
    (out,) = records(run("inspect", "parse", stdin=line).output)
    assert out == {"reasoning": "", "content": "ok", "tool_calls": [], "finish": "stop"}


def test_plan_takes_files_and_settings(tmp_path: Path) -> None:
    file = tmp_path / "sizes.jsonl"
    file.write_text('{"width": 448, "height": 449}\n{"width": 0, "height": 3}\n{"width": "a"}\n')
    out = records(run("inspect", "plan", file).output)
    assert out[0]["num_tokens"] == 16 * 17
    assert out[0]["grid_thw"] == [1, 34, 32]
    assert "error" in out[1]
    assert "error" in out[2]
    small = records(run("inspect", "plan", "--config", "demo", stdin=file.read_text()).output)
    assert small[0]["num_tokens"] <= out[0]["num_tokens"]
    assert "no such directory" in run("inspect", "plan", "--config", "/nowhere").output


def test_media_records_and_views(tmp_path: Path, faulty: Path) -> None:
    Image.new("RGB", (61, 33), "red").save(tmp_path / "a.png")
    (tmp_path / "sub").mkdir()
    Image.new("RGB", (20, 20), "blue").save(tmp_path / "sub" / "a.png")
    views = tmp_path / "views"
    result = run(
        *("inspect", "media", tmp_path / "a.png", faulty / "zero.png", tmp_path / "sub" / "a.png"),
        *("--save-dir", views),
    )
    first, bad, last = records(result.stdout)
    assert result.exit_code == 2
    assert (first["kind"], first["width"], first["height"], first["tokens"]) == ("image", 61, 33, 6)
    assert bad["code"] == "image_empty"
    assert last["path"].endswith("sub/a.png")
    assert sorted(path.name for path in views.iterdir()) == ["a-1.png", "a-2.png"]
    with Image.open(views / "a-1.png") as view:
        assert view.size == (84, 56)


def test_checkpoint_of_the_demo() -> None:
    result = run("inspect", "checkpoint", "demo")
    assert result.exit_code == 0
    assert "24,573,272" in result.output
    assert "8 x KDA + MoE: 1-2, 4-6, 8-10" in result.output


def test_checkpoint_that_does_not_fit_is_refused_with_numbers() -> None:
    result = run("inspect", "checkpoint", "demo", "--memory", 1_000_000, "--device", "cpu")
    assert result.exit_code == 1
    assert "0.09 GiB short" in result.output


def test_checkpoint_of_a_bare_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((GOLDEN / "k3_config.json").read_text())
    result = run("inspect", "checkpoint", tmp_path, "--device", "cpu")
    assert "497,220" in result.output
    assert "1,560,860,324,864" in result.output
    assert "no weights" in result.output
    assert result.exit_code == 1, "2.8 T parameters do not fit here"


# ------------------------------------------------------------------ caption: what goes wrong


def test_folders_give_their_media_in_order(tmp_path: Path) -> None:
    for name in ("b.PNG", "a.jpg", "sub/c.mp4", "sub/readme.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link.png").symlink_to(tmp_path / "a.jpg")
    names = [
        path.relative_to(tmp_path).as_posix() for path in find_files([tmp_path, tmp_path / "a.jpg"])
    ]
    assert names == ["a.jpg", "b.PNG", "sub/c.mp4"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("/nowhere/model",), "/nowhere/model: no such directory"),
        ((GOLDEN,), "no config.json; is this a checkpoint directory?"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_one_line(args, message: str, tmp_path: Path) -> None:
    Image.new("RGB", (20, 20)).save(tmp_path / "a.png")
    result = run("caption", tmp_path / "a.png", "--model", *args)
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_another_architecture_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    result = run("caption", tmp_path, "--model", tmp_path)
    assert result.exit_code == 1
    assert "no pictures or clips" in result.stderr
    Image.new("RGB", (20, 20)).save(tmp_path / "a.png")
    result = run("caption", tmp_path, "--model", tmp_path)
    assert "model_type is \"llava\", expected 'kimi_k3'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_files_that_cannot_be_used_are_reported_and_do_not_stop_the_run(faulty: Path) -> None:
    Image.new("RGB", (30, 30), "white").save(faulty / "white.png")
    result = run("caption", faulty, faulty / "absent.png")
    assert result.exit_code == 2
    assert result.stdout.count("\n") == 1, "one caption"
    assert "white.png: " in result.stdout
    lines = result.stderr.splitlines()
    assert len(lines) == 4
    reasons = {
        "text.jpg": "text",
        "zero.png": "empty",
        "huge.png": "40000",
        "absent.png": "no such",
    }
    for name, reason in reasons.items():
        (line,) = [line for line in lines if f"{name}: error: " in line]
        assert reason in line
        assert "0x" not in line


def test_json_lines_have_one_record_per_file(faulty: Path, tmp_path: Path) -> None:
    Image.new("RGB", (30, 30), "white").save(faulty / "white.png")
    output = tmp_path / "out.jsonl"
    result = run("caption", faulty, "--json", "--output", output, "--max-tokens", 3)
    printed = records(result.stdout)
    assert printed == records(output.read_text())
    assert [Path(r["path"]).name for r in printed] == [
        "huge.png",
        "text.jpg",
        "white.png",
        "zero.png",
    ]
    assert [("caption" in r, "error" in r) for r in printed] == [
        (False, True),
        (False, True),
        (True, False),
        (False, True),
    ]
    good = printed[2]
    assert good["usage"]["image_tokens"] == 4
    assert good["usage"]["completion_tokens"] <= 3
    assert (good["width"], good["height"], good["kind"]) == (30, 30, "image")


def test_an_output_that_cannot_be_written_is_found_first(tmp_path: Path) -> None:
    Image.new("RGB", (20, 20)).save(tmp_path / "a.png")
    result = run("caption", tmp_path / "a.png", "--output", tmp_path / "no" / "out.jsonl")
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr


def test_the_installed_script_runs() -> None:
    script = Path(sys.executable).parent / "k3vl"
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert __version__ in done.stdout


# ------------------------------------------------------------------ hostile surroundings

SCRIPT = Path(sys.executable).parent / "k3vl"
ODD_NAMES = (
    *(b"two\nlines.png", b"bytes\xff\xfe.png", b"esc\x1b[31m.png", b"sep\xe2\x80\xa8.png"),
    "\u00fcn\u00ef\U0001f600.png".encode(),
)


@pytest.fixture
def odd_names(tmp_path: Path) -> list[bytes]:
    """Pictures whose names are no plain text."""
    paths = [os.fsencode(tmp_path) + b"/" + name for name in ODD_NAMES]
    for path in paths:
        Image.new("RGB", (20, 20), "red").save(os.fsdecode(path))
    return paths


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii", "latin-1"])
def test_records_of_odd_names_are_one_line_each(odd_names, encoding: str) -> None:
    done = subprocess.run(
        [SCRIPT, "inspect", "media", *odd_names],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    found = records(done.stdout.decode())
    assert [record["path"] for record in found] == [os.fsdecode(path) for path in odd_names]


def test_captions_of_odd_names_are_one_line_each(odd_names, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    done = subprocess.run(
        [SCRIPT, "caption", "--quiet", "--max-tokens", "4", "--output", output, *odd_names],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(done.stdout.decode().splitlines()) == len(odd_names)
    assert b"\x1b" not in done.stdout
    found = records(output.read_text("utf-8"))
    assert [record["path"] for record in found] == [os.fsdecode(path) for path in odd_names]


def test_lines_hold_whatever_a_record_holds() -> None:
    text = "\ud800 \udcff \u2028 \x85 \x9b \n \u00e4 \U0001f600"
    line = json_line({"text": text})
    assert len(line.splitlines()) == 1
    assert json.loads(line.encode())["text"] == text
    assert json_line({"text": text}, ascii_only=True).isascii()
    assert printable(text).isprintable()


@pytest.mark.parametrize("args", [["inspect", "media"], ["caption", "--quiet", "--max-tokens=4"]])
@pytest.mark.parametrize(
    ("redirect", "status", "message"),
    [
        (">&-", 0, ""),
        (">&- 2>&-", 0, ""),
        (">/dev/full", 1, "Error: standard output cannot be written (No space left on device)\n"),
    ],
)
def test_output_that_goes_nowhere(args, redirect: str, status: int, message: str, tmp_path) -> None:
    Image.new("RGB", (20, 20)).save(tmp_path / "a.png")
    line = f'exec "$0" "$@" {redirect}'
    done = subprocess.run(
        ["sh", "-c", line, SCRIPT, *args, tmp_path / "a.png"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (status, message)


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    Image.new("RGB", (20, 20)).save(tmp_path / "a.png")
    result = run("caption", "--quiet", "--max-tokens=4", "--output", "/dev/full", tmp_path)
    assert result.exit_code == 1
    assert result.stderr == "Error: /dev/full: cannot be written (No space left on device)\n"


@pytest.mark.parametrize("args", [["inspect", "media"], ["caption", "--quiet", "--max-tokens=4"]])
def test_a_reader_that_leaves_is_no_traceback(args, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.png" for number in range(6)]
    for path in paths:
        Image.new("RGB", (20, 20)).save(path)
    with subprocess.Popen(
        [SCRIPT, *args, *paths], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


def waits_for_input(pid: int) -> bool:
    """Twice: a signal that comes just before Python begins to read is seen only after it."""
    states = []
    for _ in range(2):
        states.append(psutil.Process(pid).status())
        time.sleep(0.1)
    return states == [psutil.STATUS_SLEEPING] * 2


@pytest.mark.parametrize("args", [["inspect", "plan"], ["caption", "--quiet", "--max-tokens=4000"]])
def test_interrupt_is_one_line_and_130(args, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", (3000, 3000)).save(path)
    files = [path.with_name(f"{number}.png") for number in range(200 if "caption" in args else 0)]
    for name in files:
        name.hardlink_to(path)
    with subprocess.Popen(
        [SCRIPT, *args, *files],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        if not files:
            process.stdin.write(b'{"width": 20, "height": 20}\n')
            process.stdin.flush()
        assert process.stdout.readline(), "it is under way"
        if not files:
            until(lambda: waits_for_input(process.pid))
        process.send_signal(signal.SIGINT)
        error = process.stderr.read()
        assert (process.wait(30), error) == (130, b"interrupted\n")


def test_numbers_of_any_length_are_answers() -> None:
    result = run("inspect", "plan", stdin='{"width": ' + "9" * 5000 + ', "height": 1}\n')
    assert records(result.stdout) == [{"error": "line 1: not JSON"}]


def test_names_that_cannot_be_looked_up_are_reported(tmp_path: Path) -> None:
    result = run("inspect", "media", tmp_path / ("a" * 5000))
    assert result.exit_code == 2
    assert find_files([tmp_path / ("a" * 5000)]) == [tmp_path / ("a" * 5000)]


def test_views_that_cannot_be_saved(tmp_path: Path) -> None:
    picture, long = tmp_path / "a.png", tmp_path / ("c" * 255)
    Image.new("RGB", (20, 20)).save(picture)
    result = run("inspect", "media", picture, "--save-dir", picture / "x")
    assert result.exit_code == 1
    assert "cannot be made" in result.stderr
    long.write_bytes(picture.read_bytes())
    result = run("inspect", "media", long, picture, "--save-dir", tmp_path / "views")
    assert result.exit_code == 2
    assert [record.get("code") for record in records(result.stdout)] == ["save_failed", None]


def test_views_of_many_files_never_overwrite_each_other(tmp_path: Path) -> None:
    paths = [Path(f"{folder}/a.png") for folder in range(30_000)] + [Path("a-2.png")]
    with cpu_limit(2.0):
        stems = _unique_stems(paths)
    assert len(set(stems)) == len(paths)
    assert stems[:2] == ["a-1", "a-3"]
