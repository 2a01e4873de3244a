"""``k3vl serve --engine sglang`` around a process that behaves like SGLang."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from k3vl.app import sglang_engine
from k3vl.app.cli import cli
from k3vl.app.launch import ServeOptions
from k3vl.app.sglang_engine import SGLangCommand, SGLangProcess, check, option
from k3vl.app.sglang_launch import EngineOptions, sglang_command
from k3vl.errors import ConfigError
from k3vl.sglang.releases import SUPPORTED
from k3vl.sglang.settings import PluginSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "golden" / "sglang_tiny"


def install(directory: Path, version: str = SUPPORTED[0], plugin: str = "k3vl") -> Path:
    """A package called sglang of some release, in a folder for the path."""
    (directory / "sglang").mkdir(parents=True)
    (directory / "sglang" / "__init__.py").touch()
    shutil.copy(Path(__file__).parent / "fake_sglang.py", directory / "sglang" / "launch_server.py")
    info = directory / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{plugin} = json:loads\n")
    return directory


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Launched:
    """The command in a process of its own, around the fake."""

    def __init__(self, tmp_path: Path, *options: str, behave: dict[str, Any]) -> None:
        self.pids = tmp_path / "pids"
        behave = {"pids": str(self.pids), **behave}
        path = install(tmp_path / "site")
        self.port = free_port()
        line = [sys.executable, "-m", "k3vl", "serve", "--engine", "sglang"]
        line += ["--model", str(TINY), "--port", str(self.port), "--shutdown-seconds", "5"]
        self.process = subprocess.Popen(
            [*line, *options],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(path), "FAKE_SGLANG": json.dumps(behave)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for(self, words: str) -> None:
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if words in line:
                return
        pytest.fail("".join(lines))

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=120)
        return self.process.returncode, output

    def nothing_is_left(self) -> bool:
        end = time.monotonic() + 20
        pids = [int(pid) for pid in self.pids.read_text().split()]
        while any(map(is_running, pids)) and time.monotonic() < end:
            time.sleep(0.1)
        return not any(map(is_running, pids))


def is_running(pid: int) -> bool:
    """Whose parent was killed may stay a zombie for as long as nobody adopts it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def launch(*options: str, **behave: Any) -> Launched:
        started.append(Launched(tmp_path, *options, behave=behave))
        return started[-1]

    yield launch
    for run in started:
        run.process.kill()
        run.process.communicate(timeout=60)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_it_runs_until_it_is_told_to_stop(
    launched: Callable[..., Launched], signum: signal.Signals, code: int
) -> None:
    run = launched("--direct", "--api-key", "a-long-enough-key", start=1.0)
    run.wait_for("the plugin is active")
    run.process.send_signal(signum)
    assert run.end()[0] == code
    assert run.nothing_is_left()


@pytest.mark.parametrize(
    ("options", "signum"),
    [(("--direct",), signal.SIGKILL), ((), signal.SIGKILL), (("--direct",), signal.SIGHUP)],
    ids=["killed", "killed in front", "hung up on"],
)
def test_sglang_does_not_outlive_who_started_it(
    launched: Callable[..., Launched], options: tuple[str, ...], signum: signal.Signals
) -> None:
    run = launched(*options)
    run.wait_for('"listening"' if not options else "the plugin is active")
    run.process.send_signal(signum)
    assert run.process.wait(20) == -signum
    assert run.nothing_is_left()
    assert not guards_of(run.pids), "nor do those who saw to it"


def test_a_launcher_that_is_killed_during_the_start(launched: Callable[..., Launched]) -> None:
    run = launched("--direct", start=1000.0)
    until_there(run.pids)
    run.process.kill()
    assert run.nothing_is_left()


def test_sglang_that_does_not_listen_is_killed(launched: Callable[..., Launched]) -> None:
    """By its guard, after ``--shutdown-seconds``."""
    run = launched("--direct", deaf=True)
    run.wait_for("the plugin is active")
    run.process.kill()
    assert run.nothing_is_left()


def until_there(path: Path) -> None:
    end = time.monotonic() + 20
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < end
        time.sleep(0.05)


def guards_of(pids: Path) -> list[psutil.Process]:
    """Guards that are still there a moment later; their environment tells whose they are."""
    end = time.monotonic() + 10
    while True:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(pids) in process.environ().get("FAKE_SGLANG", ""):
                    found.append(process)
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.1)


def test_a_plugin_that_failed_ends_the_start(launched: Callable[..., Launched]) -> None:
    run = launched("--direct", plugin=False)
    code, output = run.end()
    assert code == 1
    assert "Error: SGLang runs, but without the plugin of k3vl" in output
    assert run.nothing_is_left()


def test_a_start_that_fails_is_an_error(launched: Callable[..., Launched]) -> None:
    code, output = launched("--direct", dies=True).end()
    assert code == 1
    assert "Error: SGLang ended during its start (exit code 3)" in output


def test_a_death_is_noticed(launched: Callable[..., Launched]) -> None:
    run = launched("--direct", dies_later=True)
    code, output = run.end()
    assert code == 1
    assert "Error: SGLang ended (exit code -9)" in output
    assert run.nothing_is_left()


def test_a_start_may_not_take_for_ever(launched: Callable[..., Launched]) -> None:
    run = launched("--direct", "--start-seconds", "2", start=1000.0)
    code, output = run.end()
    assert code == 1
    assert "Error: SGLang is not ready after 2 s" in output
    assert run.nothing_is_left()


def test_whoever_waits_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(install(tmp_path / "site")))
    behave = {"pids": str(tmp_path / "pids"), "start": 3.0}
    monkeypatch.setenv("FAKE_SGLANG", json.dumps(behave))
    monkeypatch.setattr(sglang_engine, "_REPORT_SECONDS", 0.5)
    said: list[str] = []
    process = SGLangProcess(command_of("--model", TINY), 5.0)
    try:
        process.wait_until_ready(60.0, said.append)
    finally:
        process.stop()
    assert len(said) > 2
    assert all(re.fullmatch(r"SGLang is starting, \d+ s", line) for line in said[:-1])
    assert re.fullmatch(r"SGLang is ready after \d+ s", said[-1])


def test_a_later_rank_is_not_asked(launched: Callable[..., Launched]) -> None:
    run = launched("--", "--nnodes", "2", "--node-rank=1", plugin=False)
    run.wait_for("SGLang is ready")
    time.sleep(0.5)
    assert run.process.poll() is None
    run.process.terminate()
    assert run.end()[0] == 143


def test_our_server_stands_in_front(launched: Callable[..., Launched]) -> None:
    run = launched("--served-model-name", "k3", "--api-key", "a-long-enough-key")
    run.wait_for('"listening"')
    assert ask(f"http://127.0.0.1:{run.port}/health", None) == 200
    assert ask(f"http://127.0.0.1:{run.port}/v1/models", None) == 401
    assert ask(f"http://127.0.0.1:{run.port}/v1/models", "a-long-enough-key") == 200
    run.process.terminate()
    assert run.end()[0] == 0
    assert run.nothing_is_left()


def test_our_server_ends_with_sglang(launched: Callable[..., Launched]) -> None:
    run = launched()
    run.wait_for('"listening"')
    os.kill(int(run.pids.read_text().split()[0]), signal.SIGKILL)
    code, output = run.end()
    assert code == 1
    assert "Error: SGLang ended (exit code -9)" in output
    assert run.nothing_is_left()


def ask(url: str, key: str | None) -> int:
    request = urllib.request.Request(url)
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as exc:
        return exc.code


# ---------------------------------------------------------------------- the command line


def command_of(*arguments: object) -> SGLangCommand:
    context = cli.commands["serve"].make_context("serve", list(map(str, arguments)))
    values = context.params
    serve = ServeOptions(**{name: values[name] for name in ServeOptions.__dataclass_fields__})
    engine = EngineOptions(**{name: values[name] for name in EngineOptions.__dataclass_fields__})
    return sglang_command(serve, engine)


def test_our_options_reach_sglang(tmp_path: Path) -> None:
    command = command_of(
        *(
            "--direct",
            "--model",
            TINY,
            "--host",
            "0.0.0.0",
            "--port",
            7,
            "--api-key",
            "long-enough-key",
        ),
        *("--served-model-name", "k3", "--max-videos", 3, "--parity", "--max-media-mib", 1),
        *("--allowed-media-path", tmp_path, "--", "--tp", "16", "--enable-symm-mem"),
    )
    line = command.line()
    assert line[1:3] == ["-m", "sglang.launch_server"]
    assert line[-3:] == ["--tp", "16", "--enable-symm-mem"]
    for name, value in {
        "--model-path": str(TINY),
        "--host": "0.0.0.0",
        "--port": "7",
        "--api-key": "long-enough-key",
        "--served-model-name": "k3",
        "--reasoning-parser": "kimi_k3",
        "--tool-call-parser": "kimi_k3",
    }.items():
        assert option(line, name) == value
    assert json.loads(option(line, "--limit-mm-data-per-request") or "")["video"] == 3
    settings = PluginSettings.from_process_config(
        json.loads(option(line, "--mm-process-config") or "")
    )
    assert settings.parity
    assert settings.max_media_bytes == 2**20
    assert settings.media_root == str(tmp_path)
    assert command.url == "http://127.0.0.1:7"
    assert "long-enough-key" not in command.shown()


def test_sglang_s_own_options_win() -> None:
    command = command_of("--model", TINY, "--", "--tool-call-parser=other")
    assert [word for word in command.line() if "tool-call-parser" in word] == [
        "--tool-call-parser=other"
    ]


@pytest.mark.parametrize(
    ("arguments", "answers"),
    [
        ((), True),
        (("--node-rank", "0"), True),
        (("--node-rank=1",), False),
        (("--encoder-only",), False),
    ],
)
def test_who_answers_chats(arguments: tuple[str, ...], answers: bool) -> None:
    assert command_of("--model", TINY, "--", *arguments).answers_chats is answers


@pytest.mark.parametrize("arguments", [(), ("--model", "demo")])
def test_a_checkpoint_must_be_named(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="needs --model DIR"):
        command_of(*arguments)


def test_sglang_s_own_server_has_one_key() -> None:
    keys = ("--api-key", "long-enough-1", "--api-key", "long-enough-2")
    with pytest.raises(ConfigError, match="there is one --api-key"):
        command_of("--direct", "--model", TINY, *keys)


def test_behind_our_server_sglang_listens_to_this_machine_only() -> None:
    command = command_of("--model", TINY, "--host", "0.0.0.0", "--api-key", "long-enough-key")
    assert option(command.line(), "--host") == "127.0.0.1"
    assert option(command.line(), "--api-key") is None
    assert command.port != 8000


def test_two_engines_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="names another engine"):
        command_of("--model", TINY, "--backend", "http://example.org/v1")


def on_the_path(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.syspath_prepend(str(directory))


def test_another_release_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_path(monkeypatch, install(tmp_path, version="0.5.16"))
    with pytest.raises(ConfigError, match=r"SGLang 0\.5\.16 is installed"):
        check(command_of("--model", TINY))


def test_a_plugin_that_is_switched_off_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_path(monkeypatch, install(tmp_path))
    monkeypatch.setenv("SGLANG_PLUGINS", "other, another")
    with pytest.raises(ConfigError, match="leaves out k3vl"):
        check(command_of("--model", TINY))
    monkeypatch.setenv("SGLANG_PLUGINS", "other, k3vl")
    check(command_of("--model", TINY))


@pytest.mark.parametrize("argument", ["--port", "--mm-process-config={}", "--model-path"])
def test_an_option_is_not_set_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    on_the_path(monkeypatch, install(tmp_path))
    with pytest.raises(ConfigError, match="is set by k3vl serve"):
        check(command_of("--model", TINY, "--", argument))


def test_a_directory_without_a_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_path(monkeypatch, install(tmp_path / "site"))
    with pytest.raises(ConfigError, match=r"no config\.json"):
        check(command_of("--model", tmp_path))


def test_other_engines_take_none_of_it() -> None:
    from click.testing import CliRunner

    result = CliRunner().invoke(cli, ["serve", "--", "--tp", "2"])
    assert result.exit_code == 1
    assert "are for --engine sglang" in result.output
