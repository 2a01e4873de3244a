"""``k3vl serve --engine sglang``: starts SGLang with our plugin and sees that it works.

SGLang runs as a child with its own command line, so every option of it can be given. It only logs
a plugin that fails; here that ends the start, because a server that silently drops clips from
prompts is worse than none.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import TYPE_CHECKING, Any, Final

from k3vl.app.sglang_guard import Guard, end_group
from k3vl.config import load_config, load_media_config
from k3vl.errors import BackendError, ConfigError
from k3vl.sglang.releases import check_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import FrameType

    from k3vl.sglang.settings import PluginSettings

PLUGIN: Final = "k3vl"
OURS: Final = ("--model-path", "--model", "--host", "--port", "--mm-process-config")
"""Options of SGLang that ``k3vl serve`` sets from its own."""
PARSERS: Final = ("--reasoning-parser", "--tool-call-parser")
PROBE: Final = "k3vlprobe:"
"""A URL that our media front end refuses by its scheme; SGLang alone never looks at it."""
_POLL_SECONDS = 1.0
_REPORT_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangCommand:
    """How SGLang is to be started.

    Attributes:
        model: checkpoint directory.
        host, port: where it listens.
        api_key: what it asks for, if anything.
        served_model_name: name of the model, or its directory's.
        settings: for the plugin.
        max_images, max_videos: of one request.
        arguments: more of SGLang's own options, as they are.
    """

    model: Path
    host: str
    port: int
    settings: PluginSettings
    api_key: str | None = None
    served_model_name: str | None = None
    max_images: int = 512
    max_videos: int = 16
    arguments: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """Where this machine reaches it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def answers_chats(self) -> bool:
        """Whether this process will: not a later rank of several machines, not a bare encoder."""
        rank = option(self.arguments, "--node-rank")
        return rank in (None, "0") and "--encoder-only" not in self.arguments

    def line(self) -> list[str]:
        """The command line."""
        limits = json.dumps({"image": self.max_images, "video": self.max_videos})
        line = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model)]
        line += ["--host", self.host, "--port", str(self.port)]
        line += ["--mm-process-config", self.settings.process_config()]
        for name in PARSERS:
            if option(self.arguments, name) is None:
                line += [name, "kimi_k3"]
        if option(self.arguments, "--limit-mm-data-per-request") is None:
            line += ["--limit-mm-data-per-request", limits]
        if self.api_key is not None:
            line += ["--api-key", self.api_key]
        if self.served_model_name is not None:
            line += ["--served-model-name", self.served_model_name]
        return [*line, *self.arguments]

    def shown(self) -> str:
        """The command line for people, without the key."""
        return shlex.join("***" if word == self.api_key else word for word in self.line())


def option(arguments: Sequence[str], name: str) -> str | None:
    """The value of an option given as ``--name value`` or ``--name=value``; the last one counts."""
    value = None
    for index, word in enumerate(arguments):
        if word == name and index + 1 < len(arguments):
            value = arguments[index + 1]
        elif word.startswith(name + "="):
            value = word[len(name) + 1 :]
    return value


def check(command: SGLangCommand) -> None:
    """Everything that can be known before minutes of loading.

    Raises:
        ConfigError: SGLang is missing or of another release, our plugin cannot be found by it or is
            switched off, an option is set twice, or the checkpoint is not one of K3.
    """
    try:
        check_version(version("sglang"))
    except PackageNotFoundError:
        raise ConfigError("SGLang is not installed: pip install 'k3vl[sglang]'") from None
    if not any(entry.name == PLUGIN for entry in entry_points(group="sglang.srt.plugins")):
        raise ConfigError("SGLang cannot find the plugin: k3vl is not installed as a package here")
    allowed = os.environ.get("SGLANG_PLUGINS")
    if allowed and PLUGIN not in (name.strip() for name in allowed.split(",")):
        raise ConfigError(f"SGLANG_PLUGINS is set and leaves out {PLUGIN}")
    for name in OURS:
        if any(word == name or word.startswith(name + "=") for word in command.arguments):
            raise ConfigError(f"{name} is set by k3vl serve; give it before the --")
    load_config(command.model)
    load_media_config(command.model)


class SGLangProcess:
    """A running SGLang and everything that it starts; end it with :meth:`stop`.

    It does not outlive this process, however that ends.
    """

    def __init__(self, command: SGLangCommand, shutdown_seconds: float) -> None:
        """Start it, in a process group of its own.

        Args:
            command: how.
            shutdown_seconds: that running answers have left at its end.
        """
        self._command, self._shutdown_seconds = command, shutdown_seconds
        self._guard = Guard(shutdown_seconds)
        # Its log is the user's: it goes where ours goes.
        self._process = subprocess.Popen(  # noqa: S603 - no shell, our own interpreter
            command.line(), start_new_session=True
        )
        self._guard.watch_over(self._process.pid)

    @property
    def pid(self) -> int:
        """Of the first process."""
        return self._process.pid

    def wait_until_ready(self, seconds: float, say: Callable[[str], None]) -> None:
        """Wait until it makes tokens (or, for a later rank, until it waits for the first).

        Raises:
            BackendError: it ended, or takes longer.
        """
        start = time.monotonic()
        said = start
        while not self._is_healthy():
            self._require_alive()
            now = time.monotonic()
            if now - start > seconds:
                raise BackendError(f"SGLang is not ready after {seconds:.0f} s")
            if now - said >= _REPORT_SECONDS:
                said = now
                say(f"SGLang is starting, {now - start:.0f} s")
            time.sleep(_POLL_SECONDS)
        say(f"SGLang is ready after {time.monotonic() - start:.0f} s")

    def verify_plugin(self) -> None:
        """See that clips reach our media front end.

        Raises:
            BackendError: they do not.
        """
        part = {"type": "video_url", "video_url": {"url": PROBE}}
        body = {
            "model": self._command.served_model_name or str(self._command.model),
            "messages": [{"role": "user", "content": [part]}],
            "max_tokens": 1,
        }
        status, answer = self._ask("/v1/chat/completions", json.dumps(body).encode(), seconds=120)
        if status == 400 and f"'{PROBE}' URLs are not accepted" in answer:
            return
        raise BackendError(
            "SGLang runs, but without the plugin of k3vl: its log says why (look for 'plugin'); "
            f"a clip was answered with {status or 'nothing'}: {' '.join(answer.split())[:200]}"
        )

    def wait(self) -> int:
        """Wait for its end; the exit code."""
        return self._process.wait()

    @contextlib.contextmanager
    def end_stops_us(self) -> Iterator[Callable[[], bool]]:
        """While the block runs, its end is a SIGTERM for this process; says whether it came."""
        ended, left = threading.Event(), threading.Event()

        def watch() -> None:
            self._process.wait()
            if not left.is_set():
                ended.set()
                os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=watch, name="k3vl-sglang", daemon=True).start()
        try:
            yield ended.is_set
        finally:
            left.set()

    def stop(self) -> None:
        """End it and everything that it started."""
        end_group(self._process.pid, self._shutdown_seconds)
        self._process.wait()
        self._guard.dismiss()

    def _require_alive(self) -> None:
        code = self._process.poll()
        if code is not None:
            raise BackendError(f"SGLang ended during its start (exit code {code}); see its log")

    def _is_healthy(self) -> bool:
        # A health check makes a token, and the first one of all may compile for minutes.
        return self._ask("/health", None, seconds=30)[0] == 200

    def _ask(self, path: str, body: bytes | None, *, seconds: float) -> tuple[int, str]:
        """(status, text); status 0 where nobody answers."""
        request = urllib.request.Request(self._command.url + path, data=body)  # noqa: S310 - ours
        request.add_header("Content-Type", "application/json")
        if self._command.api_key is not None:
            request.add_header("Authorization", f"Bearer {self._command.api_key}")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=seconds) as response:
                return response.status, response.read().decode("utf-8", "replace")
        except urllib.error.HTTPError as exc:
            return exc.code, exc.read().decode("utf-8", "replace")
        except OSError:
            return 0, ""


def run(
    command: SGLangCommand,
    *,
    start_seconds: float,
    shutdown_seconds: float,
    say: Callable[[str], None],
    front: Callable[[], None] | None = None,
) -> None:
    """Run SGLang until it ends or we are told to.

    Args:
        command: how.
        start_seconds: longest start.
        shutdown_seconds: time that running answers have left at the end.
        say: takes a line for the user.
        front: runs beside it once it is ready, until told to stop; None: nothing does.

    Raises:
        ConfigError: see :func:`check`.
        BackendError: it does not start, runs without the plugin, or ended by itself.
    """
    check(command)
    say(command.shown())
    previous = signal.signal(signal.SIGTERM, _interrupt)
    process = SGLangProcess(command, shutdown_seconds)
    try:
        process.wait_until_ready(start_seconds, say)
        if command.answers_chats:
            process.verify_plugin()
            say("the plugin is active: images and video")
        if front is not None and not _runs_out(process, front):
            return
        code = process.wait()
        raise BackendError(f"SGLang ended (exit code {code}); see its log")
    finally:
        process.stop()
        signal.signal(signal.SIGTERM, previous)


def _runs_out(process: SGLangProcess, front: Callable[[], None]) -> bool:
    """Run the front; whether it stopped because SGLang ended."""
    with process.end_stops_us() as has_ended:
        try:
            front()
        except SystemExit:  # the front was not serving yet
            if not has_ended():
                raise
        return has_ended()


def _interrupt(signum: int, frame: FrameType | None) -> Any:
    """A polite end is an end: what was started is stopped, the exit code says why."""
    sys.exit(128 + signum)
