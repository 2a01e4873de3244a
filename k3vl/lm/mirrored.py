"""One engine over several GPUs of a host: every rank has a whole engine, and all do the same.

What an engine decides follows from its calls and from the tokens, and logits are gathered, so all
ranks have the same bits of them. So the first rank, which has the callers, tells the others each
call by a pipe, and they do it too; only sums and logits go between GPUs. What would differ is sent:
seeds that nobody gave, and the masks of constrained answers. Media are encoded on every rank.

A rank that fails says why, or its pipe ends; the first one then ends what waits on its GPU, and its
engine fails with that. Ranks end with the pipe to the first, whatever has become of it.
"""

from __future__ import annotations

import gc
import secrets
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias
from zlib import crc32

import torch
import torch.distributed as dist

from k3vl.errors import BackendError, Cancelled, ConfigError, K3VLError
from k3vl.lm.engine import Engine, EngineConfig
from k3vl.lm.ranks import Ranks
from k3vl.lm.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    import numpy as np

    from k3vl.lm.backend import Encoder, Token
    from k3vl.lm.job import Job
    from k3vl.lm.model import K3Model
    from k3vl.types import LogitMask

TIMEOUT = timedelta(minutes=10)
"""Of ranks that wait for each other: one may compile kernels that the others have."""
END_SECONDS = 10.0
"""That a rank has to end by itself."""
BLAME_SECONDS = 5.0
"""In which a rank that has failed is heard of, behind a sum that failed for it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineParts:
    """What a rank's engine is made of; see :class:`k3vl.lm.engine.Engine`."""

    model: K3Model
    encoder: Encoder
    config: EngineConfig
    stop_ids: tuple[int, ...] = ()


Message: TypeAlias = tuple[str, tuple[Any, ...]]
"""What to do, and with what."""
Build: TypeAlias = "Callable[[Ranks], EngineParts]"
"""Makes a rank's parts in its own process; a function by name and plain values."""


class MirroredEngine(Engine):
    """An engine that does what other ranks' engines do; media are encoded in the step.

    Attributes:
        digest: of all tokens so far, the same on all ranks.
    """

    def __init__(self, parts: EngineParts) -> None:
        """See :class:`k3vl.lm.engine.Engine`."""
        super().__init__(parts.model, parts.encoder, parts.config, stop_ids=parts.stop_ids)
        self.digest = 0

    def _deliver(self, job: Job, token: Token) -> None:
        self.digest = crc32(f"{job.sequence.id} {token.id}".encode(), self.digest)
        super()._deliver(job, token)

    def release(self) -> None:
        """Drop recorded steps: they hold sums, which must go before the ranks part."""
        self._flight = None
        self.decoder.renew(self.model)
        self.prompts.renew(self.model)
        gc.collect()


# ---------------------------------------------------------------------- the first rank


class LeadingEngine(MirroredEngine):
    """The first rank's engine; owns the others' processes."""

    def __init__(self, parts: EngineParts, followers: Followers) -> None:
        """Make the first rank's engine, and wait for the others'.

        Raises:
            K3VLError: what a rank could not do, with its number.
        """
        super().__init__(parts)
        self.followers = followers
        self._apart = False
        followers.join(self.model.embedding.device)

    def queue(self, job: Job) -> None:
        """See :meth:`Engine.queue`; the others get the job with a seed, and without its mask."""
        told, masked = replace(job, sink=_drop), False
        if isinstance(job.sampler, Sampler):
            params = job.sampler.params
            if params.seed is None:
                params = replace(params, seed=secrets.randbits(63))
            told.sampler = Sampler(replace(params, logit_mask=None))
            if masked := params.logit_mask is not None:
                params = replace(params, logit_mask=_ToldMask(params.logit_mask, self.followers))
            job.sampler = Sampler(params)
        super().queue(job)
        self.followers.tell("queue", told, masked)

    def cancel(self, request_id: int) -> None:
        """See :meth:`Engine.cancel`."""
        super().cancel(request_id)
        self.followers.tell("cancel", request_id)

    def fail_all(self, error: K3VLError) -> None:
        """See :meth:`Engine.fail_all`."""
        super().fail_all(error)
        self.followers.tell("fail_all", Cancelled("the first rank ended all"))

    def step(self) -> bool:
        """See :meth:`Engine.step`.

        Raises:
            BackendError: a rank has failed.
        """
        with self._together("step", self.digest):
            return super().step()

    def everywhere(self, work: Callable[[Engine], Any]) -> Any:
        """Have every rank do something between two steps; what it gives here."""
        with self._together("do", work):
            return work(self)

    @contextmanager
    def _together(self, what: str, *values: Any) -> Iterator[None]:
        """Around something in which ranks wait for each other."""
        self._apart = True  # unless it goes well
        self.followers.tell(what, *values)
        try:
            self.followers.check()
            yield
        except Exception as exc:
            if failure := self.followers.blamed():
                raise failure from exc
            raise
        self._apart = False

    def update(self, model: K3Model, encoder: Encoder) -> None:
        """See :meth:`Engine.update`; not over several ranks.

        Raises:
            BackendError: always.
        """
        raise BackendError("weights cannot be renewed while several ranks share them")

    def close(self) -> None:
        """See :meth:`Engine.close`; waits for the other ranks' processes."""
        super().close()
        self.followers.close(self.release, gently=not self._apart)

    def _deliver(self, job: Job, token: Token) -> None:
        self.followers.check()  # what a sum has given then is nothing
        super()._deliver(job, token)


def lead(size: int, build: Build, device: str) -> LeadingEngine:
    """Start the other ranks, build this one beside them, and meet.

    Args:
        size, build, device: see :class:`Followers`.

    Raises:
        K3VLError: what a rank could not do, with its number.
    """
    followers = Followers(size, build, device)
    try:
        return LeadingEngine(build(followers.ranks), followers)
    except BaseException:
        followers.kill()
        raise


class Followers:
    """The processes of all ranks but the first, as the first sees them.

    Attributes:
        ranks: as the first sees them.
        failure: of the rank that failed first.
    """

    def __init__(self, size: int, build: Build, device: str) -> None:
        """Start the others; each begins to build its engine.

        Args:
            size: ranks.
            build: makes their parts.
            device: ``cuda``, where rank r has the r-th; or ``cpu``.
        """
        self.ranks = Ranks(0, size)
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
                connection.send(("build", (Ranks(rank, size), build, device)))

    def join(self, device: torch.device) -> None:
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
            self.ranks.join(rank_device(device.type, 0), store, TIMEOUT)
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


class _ToldMask:
    """A request's mask whose bits the other ranks hear of."""

    def __init__(self, mask: LogitMask, followers: Followers) -> None:
        self._mask, self._followers = mask, followers

    def allowed(self) -> np.ndarray | None:
        bits = self._mask.allowed()
        self._followers.tell("bits", bits)
        return bits

    def accept(self, token_id: int) -> None:
        self._mask.accept(token_id)


# ---------------------------------------------------------------------- the other ranks


class Follower:
    """A rank that does what the first one tells."""

    def __init__(
        self, inbox: SimpleQueue[Message], report: Callable[[K3VLError | None], None]
    ) -> None:
        """Messages come by ``inbox``; ``report`` tells that an engine is ready."""
        self._inbox, self._report = inbox, report

    def run(self) -> None:
        """Build, then obey until the first rank says that this is the end.

        Raises:
            K3VLError: this rank cannot go on.
        """
        ranks, build, kind = self._hear("build")
        device = rank_device(kind, ranks.rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.engine = engine = MirroredEngine(build(ranks))
        if engine.config.num_threads is not None:
            torch.set_num_threads(engine.config.num_threads)
        self._report(None)
        ranks.join(device, self._hear("join")[0], TIMEOUT)
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


def _drop(event: Token | K3VLError) -> None:
    """The first rank has the callers."""


def rank_device(kind: str, rank: int) -> torch.device:
    """A rank's own."""
    return torch.device(kind, rank) if kind == "cuda" else torch.device(kind)


def require_ranks(size: int, device: torch.device) -> None:
    """Refuse what cannot be: more ranks than there are GPUs, or a second group of them.

    Raises:
        ConfigError: with both numbers; or this process has ranks already, of which torch can have
            one group.
    """
    if size > 1 and dist.is_initialized():
        raise ConfigError("this process shares a model with other ranks already")
    if device.type == "cuda" and size > (count := torch.cuda.device_count()):
        raise ConfigError(f"{size} ranks: each has a GPU of its own, torch sees {count}")
