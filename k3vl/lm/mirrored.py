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
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
import torch.distributed as dist

from k3vl.errors import BackendError, Cancelled, ConfigError, K3VLError
from k3vl.lm.encoding import EncodeInStep
from k3vl.lm.engine import Engine, EngineConfig
from k3vl.lm.followers import Followers
from k3vl.lm.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np

    from k3vl.lm.backend import Encoder, Token
    from k3vl.lm.encoding import Made
    from k3vl.lm.job import Job
    from k3vl.lm.model import K3Model
    from k3vl.lm.ranks import Ranks
    from k3vl.types import LogitMask


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineParts:
    """What a rank's engine is made of; see :class:`k3vl.lm.engine.Engine`."""

    model: K3Model
    encoder: Encoder
    config: EngineConfig
    stop_ids: tuple[int, ...] = ()


class MirroredEngine(Engine):
    """An engine that does what other ranks' engines do; media are encoded in the step.

    Attributes:
        digest: of all tokens so far, the same on all ranks.
    """

    def __init__(self, parts: EngineParts) -> None:
        """See :class:`k3vl.lm.engine.Engine`."""
        super().__init__(
            parts.model,
            parts.encoder,
            parts.config,
            stop_ids=parts.stop_ids,
            encoding=_EncodeOrEnd,
        )
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
        followers.join()

    def queue(self, job: Job) -> None:
        """See :meth:`Engine.queue`; the others get the job with a seed, and without its mask."""
        told, masked = replace(job, sink=drop), False
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

    def close(self) -> None:
        """See :meth:`Engine.close`; waits for the other ranks' processes."""
        super().close()
        self.followers.close(self.release, gently=not self._apart)

    def _deliver(self, job: Job, token: Token) -> None:
        self.followers.check()  # what a sum has given then is nothing
        super()._deliver(job, token)


def lead(size: int, build: Callable[[Ranks], EngineParts], device: str) -> LeadingEngine:
    """Start the other ranks, build this one beside them, and meet.

    Args:
        size: ranks.
        build: makes a rank's parts in its own process: a function by name, and plain values.
        device: ``cuda``, where rank r has the r-th; or ``cpu``.

    Raises:
        K3VLError: what a rank could not do, with its number.
    """
    followers = Followers(size, build, device)
    try:
        return LeadingEngine(build(followers.ranks), followers)
    except BaseException:
        followers.kill()
        raise


class _EncodeOrEnd(EncodeInStep):
    """What a rank cannot encode ends the engine.

    By itself it would leave out a request that the others run, and their sums would not fit.
    """

    def take(self, *, wait: bool) -> list[Made]:
        """See :class:`k3vl.lm.encoding.Encoding`.

        Raises:
            BackendError: the tower has failed.
        """
        made = super().take(wait=wait)
        for _, rows in made:
            if isinstance(rows, BackendError):
                raise rows
        return made


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


def drop(event: Token | K3VLError) -> None:
    """The first rank has the callers."""


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
