"""One measurement: the same work by our kernel, by its variants and by others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True)
class Work:
    """What a peer is measured at, its inputs at hand.

    Attributes:
        timed: the work; it may go on from the states that its last call left.
        result: the same from the case's own states, in the form of what ``Case.ours`` returns, to
            be compared with it; None where what the peer leaves out forbids that.
    """

    timed: Callable[[], object]
    result: Callable[[], torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """Another implementation, prepared when its turn comes and forgotten after it.

    Attributes:
        prepare: imports it, lays out its inputs; may fail, which costs nobody else anything.
    """

    prepare: Callable[[], Work]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Work of one shape.

    Attributes:
        op, shape: what is measured.
        ours: the kernel as it is launched by default; returns what ``want`` is compared with.
        timed: the same without copies that keep its inputs as they were; None: ``ours`` itself.
        want: the same by the reference, in float64 or at least float32; None where the case is too
            large for it, and a smaller case of the op has been compared.
        limit: of the ratio of norms.
        bytes, flops: the least that the work must move and compute.
        variants: other launches of ours; as a ``Peer`` where only a result from the case's own
            states can be compared.
        compared: whether every variant returns what ``ours`` does; one that is wrong by ``limit``
            against it is not timed.
        peers: other implementations, with what they leave out.
    """

    op: str
    shape: str
    ours: Callable[[], torch.Tensor]
    want: Callable[[], torch.Tensor] | None
    timed: Callable[[], object] | None = None
    limit: float
    bytes: float
    flops: float
    variants: Mapping[str, Callable[[], object] | Peer] = field(default_factory=dict)
    compared: bool = False
    peers: Mapping[str, Callable[[], object] | Peer] = field(default_factory=dict)


def ratio_of_norms(got: torch.Tensor, want: torch.Tensor) -> float:
    """Of the difference and ``want``; NaN where anything is not finite."""
    want = want.double()
    return float((got.double() - want).norm() / want.norm())


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random values on the device."""
    return torch.randn(shape, device="cuda", dtype=dtype)
