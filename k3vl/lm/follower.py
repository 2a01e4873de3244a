"""``python -m k3vl.lm.follower FD``: the process of a rank that is not the first.

A thread reads the pipe, so that it is known at once when the first rank is gone, even where this
one waits for it on its GPU; then the process ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from queue import SimpleQueue

from k3vl.errors import BackendError, K3VLError
from k3vl.lm.mirrored import Follower, Message


def main() -> None:
    """Run until told to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the first rank ends the others
    connection = Connection(int(sys.argv[1]))
    inbox: SimpleQueue[Message] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), daemon=True).start()
    try:
        Follower(inbox, connection.send).run()
    except K3VLError as exc:
        _leave(connection, exc)
    except BaseException as exc:  # noqa: BLE001 - whatever it was, the first rank must hear of it
        traceback.print_exc()
        _leave(connection, BackendError(f"{type(exc).__name__}: {exc}"))


def _read(connection: Connection, inbox: SimpleQueue[Message]) -> None:
    while True:
        try:
            inbox.put(connection.recv())
        except (EOFError, OSError):
            os._exit(1)
        except Exception as exc:  # noqa: BLE001 - a message that cannot be read
            _leave(connection, BackendError(f"{type(exc).__name__}: {exc}"))


def _leave(connection: Connection, error: K3VLError) -> None:
    """Say why; sums that are under way are not waited for."""
    try:
        connection.send(error)
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
