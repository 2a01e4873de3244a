"""Ends SGLang when whoever started it is gone without having done so: killed, or hung up on.

A process of its own, because nothing else is sure to be there then. Its standard input is a pipe
from the launcher: a line names SGLang's first process, another dismisses the guard, and an end
without that line means that the launcher is gone. No system call of one kernel is needed for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import psutil

_KILL_SECONDS = 10.0
_DISMISSED = "dismissed\n"


class Guard:
    """The launcher's end.

    Args:
        seconds: that running answers have left once the launcher is gone.
    """

    def __init__(self, seconds: float) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - no shell, our own interpreter
            [sys.executable, "-m", __name__, str(seconds)],
            stdin=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,  # what ends the launcher's terminal must not end this
        )

    def watch_over(self, pid: int) -> None:
        """Name the process, which leads a group of its own."""
        self._tell(f"{pid}\n")

    def dismiss(self) -> None:
        """It has ended, or never began."""
        self._tell(_DISMISSED)
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it
            self._process.stdin.write(line)
            if line == _DISMISSED:
                self._process.stdin.close()


def end_group(pid: int, seconds: float) -> None:
    """End a process that leads a group, and everything that it started.

    Args:
        pid: of the first process.
        seconds: after which it is killed.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        tree = first.children(recursive=True)
        first.terminate()
        _, alive = psutil.wait_procs([first], timeout=seconds)
        for process in [*alive, *tree]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(tree, timeout=_KILL_SECONDS)
    with contextlib.suppress(ProcessLookupError):  # what was started meanwhile
        os.killpg(pid, signal.SIGKILL)


def main() -> None:
    """Wait for the launcher's last word, or for its end."""
    pid = sys.stdin.readline().strip()
    if pid.isdecimal() and sys.stdin.readline() != _DISMISSED:
        end_group(int(pid), float(sys.argv[1]))


if __name__ == "__main__":
    main()
