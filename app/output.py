"""What the commands write on standard output: records of one line each, names that stay one line.

File names on Linux are bytes: they may hold line ends, terminal escapes, or no text at all. None of
that may break a line, a reader of JSON Lines, or the run.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
from typing import TYPE_CHECKING, Any

from k3vl.errors import ConfigError

if TYPE_CHECKING:
    from types import FrameType

# What readers take for line ends beside "\n", and halves of pairs, which UTF-8 cannot hold (Python
# uses them for bytes of a file name that are no text).
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def json_line(record: dict[str, Any], *, ascii_only: bool = False) -> str:
    """One JSON Lines record with its line end; always one line, always valid UTF-8."""
    text = json.dumps(record, ensure_ascii=ascii_only)
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"


def write_record(record: dict[str, Any]) -> None:
    """One JSON Lines record on standard output, at once.

    Raises:
        ConfigError: standard output cannot be written; a reader that has gone is a
            ``BrokenPipeError`` instead.
    """
    encoding = (sys.stdout.encoding or "").lower().replace("_", "-")
    write_text(json_line(record, ascii_only=encoding not in ("utf-8", "utf8")))


def write_text(text: str) -> None:
    """Text on standard output, at once.

    Raises:
        ConfigError: as :func:`write_record`.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as exc:
        # Python would try the rest again on its way out, and complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise ConfigError(f"standard output cannot be written ({exc.strerror})") from exc


def printable(text: object) -> str:
    """Text for one line of a terminal: control characters and broken halves are escaped."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text)
    )


def prepare_streams() -> None:
    """Let no character and no closed stream end a run with a traceback."""
    sys.stdout = _writable(sys.stdout)
    sys.stderr = _writable(sys.stderr)


def _writable(stream: Any) -> Any:
    """The stream, with characters escaped that it cannot hold; a closed one takes everything."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream


def prepare_interrupt() -> None:
    """The first Ctrl-C ends the run in order; the second ends the process at once."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt

    # Started in the background of a shell, a process is told to ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
