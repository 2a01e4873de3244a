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
from dataclasses import replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from k3vl.errors import BackendError, K3VLError
from k3vl.lm.mirrored import MirroredEngine
from k3vl.lm.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

Message: TypeAlias = tuple[str, tuple[Any, ...]]
"""What to do, and with what."""


class Follower:
    """A rank that does what the first one tells."""

    def __init__(
        self, inbox: SimpleQueue[Message], report: Callable[[K3VLError | None], None]
    ) -> None:
        """Messages come by ``inbox``; ``report`` tells that the engine is ready."""
        self._inbox, self._report = inbox, report

    def run(self) -> None:
        """Build, then obey until the first rank says that this is the end.

        Raises:
            K3VLError: this rank cannot go on.
        """
        ranks, build = self._hear("build")
        if ranks.device.type == "cuda":
            torch.cuda.set_device(ranks.device)
        self.engine = engine = MirroredEngine(build(ranks))
        if engine.config.num_threads is not None:
            torch.set_num_threads(engine.config.num_threads)
        self._report(None)
        ranks.join(*self._hear("join"))
        while self._obey(*self._inbox.get()):
            pass
        engine.close()
        engine.release()
        ranks.leave()

    def _obey(self, what: str, values: tuple[Any, ...]) -> bool:
        if what == "step":
            if values[0] != self.engine.digest:
                raise BackendError("its tokens are not those of rank 0")
            self.engine.step()
        elif what == "do":
            values[0](self.engine)
        elif what == "queue":
            job, masked = values
            if masked:
                job.sampler = Sampler(replace(job.sampler.params, logit_mask=self))
            self.engine.queue(job)
        elif what in ("cancel", "fail_all"):
            getattr(self.engine, what)(*values)
        elif what != "bits":  # of a step that ended before it asked
            return what != "close"
        return True

    def _hear(self, wanted: str) -> tuple[Any, ...]:
        what, values = self._inbox.get()
        if what != wanted:
            raise BackendError(f"told {what}, not {wanted}")
        return values

    def allowed(self) -> np.ndarray | None:
        """See :class:`k3vl.types.LogitMask`."""
        bits: np.ndarray | None = self._hear("bits")[0]
        return bits

    def accept(self, token_id: int) -> None:
        """See :class:`k3vl.types.LogitMask`; the first rank steps its own."""


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
