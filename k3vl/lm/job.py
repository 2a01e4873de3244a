"""A request inside the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3vl.errors import K3VLError
    from k3vl.lm.backend import Token
    from k3vl.lm.sampler import Forced, Sampler
    from k3vl.lm.sequence import Sequence
    from k3vl.types import Prompt


@dataclass(slots=True, kw_only=True, eq=False)
class Targets:
    """Tokens whose log-probabilities are asked for.

    Attributes:
        token_ids: they follow token ``first`` of the sequence.
        first: the token before the first of them.
        delivered: how many have been reported; a preemption does not report twice.
    """

    token_ids: tuple[int, ...]
    first: int
    delivered: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A request inside the engine; one with ``targets`` generates nothing."""

    sequence: Sequence
    prompt: Prompt
    sampler: Sampler | Forced
    stop_ids: frozenset[int]
    sink: Callable[[Token | K3VLError], None]
    token_ids: list[int]
    arrived: float
    targets: Targets | None = None
