"""The processes of ranks that are not the first: started, told, heard of and ended by the first.

Each has a pipe to the first one, which is a rank's life as well: ``follower.py`` ends with it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from k3vl.errors import BackendError, K3VLError
from k3vl.lm.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

END_SECONDS = 10.0
"""That a rank has to end by itself."""
BLAME_SECONDS = 5.0
"""In which a rank that has failed is heard of, behind a sum that failed for it."""


class Followers:
    """The processes of all ranks but the first, as the first sees them.

    Attributes:
        ranks: as the first sees them.
        failure: of the rank that failed first.
    """

    def __init__(self, size: int, build: Callable[..., Any], device: str) -> None:
        """Start them; each begins to build its engine. See :func:`k3vl.lm.mirrored.lead`."""
        self.ranks = Ranks(0, size, device)
        self.failure: K3VLError | None = None
        self._failed, self._closing = threading.Event(), False
        self._reports: SimpleQueue[K3VLError | None] = SimpleQueue()
        self._folder = tempfile.TemporaryDirectory(prefix="k3vl-ranks-")
        self._processes: dict[Connection, subprocess.Popen[bytes]] = {}
        for _ in range(1, size):
            ours, theirs = Pipe()
            command = [sys.executable, "-m", "k3vl.lm.follower", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()])  # noqa: S603 - fixed
            theirs.close()
            self._processes[ours] = process
        self._threads = [
            threading.Thread(target=self._listen, args=(rank, *pair), daemon=True)
            for rank, pair in enumerate(self._processes.items(), start=1)
        ]
        for thread in self._threads:
            thread.start()
        for rank, connection in enumerate(self._processes, start=1):
            with suppress(OSError):
                connection.send(("build", (Ranks(rank, size, device), build)))

    def join(self) -> None:
        """Wait for all engines, then meet.

        Raises:
            K3VLError: what a rank could not do.
        """
        for _ in self._processes:
            if (failure := self._reports.get()) is not None:
                raise failure
        store = Path(self._folder.name) / "store"
        self.tell("join", store)
        try:
            self.ranks.join(store)
        except Exception as exc:
            raise self.blamed() or BackendError(f"ranks do not meet: {exc}") from exc

    def tell(self, what: str, *values: Any) -> None:
        """Send all a message; what has become of one that cannot be told is heard otherwise."""
        for connection in self._processes:
            with suppress(OSError):
                connection.send((what, values))

    def check(self) -> None:
        """Raise the failure of a rank that has failed."""
        if self.failure is not None:
            raise self.failure

    def blamed(self) -> K3VLError | None:
        """The failure behind an error that has just come up, if it is one of another rank."""
        self._failed.wait(BLAME_SECONDS)
        return self.failure

    def close(self, release: Callable[[], None], *, gently: bool) -> None:
        """End all; ``release`` drops what this rank has recorded."""
        self._closing = True
        if gently and self.failure is None:
            self.tell("close")
        else:
            self.kill()
            self.ranks.abort()
        for end in (release, self.ranks.leave):
            with suppress(RuntimeError):  # of a device that the failure has taken with it
                end()
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End all processes at once."""
        self._closing = True
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        for thread in self._threads:
            thread.join()
        for connection in self._processes:
            connection.close()
        self._folder.cleanup()

    # ------------------------------------------------------------------ on listening threads

    def _listen(self, rank: int, connection: Connection, process: subprocess.Popen[bytes]) -> None:
        """Hear whether a rank is ready, or has failed, until its pipe ends."""
        while True:
            try:
                report: K3VLError | None = connection.recv()
            except (EOFError, OSError):
                if not self._closing:
                    self._fail(rank, BackendError(f"its process ended ({process.wait()})"))
                return
            if report is None:
                self._reports.put(None)
            else:
                self._fail(rank, report)

    def _fail(self, rank: int, error: K3VLError) -> None:
        if self.failure is not None or self._closing:
            return
        self.failure = type(error)(f"rank {rank} of {self.ranks.size}: {error}")
        self._failed.set()
        self._reports.put(self.failure)
        self.ranks.abort()
