"""The seam between the pipeline and whatever runs the language model.

A backend takes prompts of token ids with media spans and delivers token ids. It knows nothing of
chat formats. ``lm/local.py`` is the embedded engine; tests fill the seam with a fake.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from k3vl.errors import K3VLError
    from k3vl.lm.model import K3Model
    from k3vl.lm.stats import EngineStats
    from k3vl.types import EncoderItem, Prompt, SamplingParams, TokenLogprob


InFlight: TypeAlias = Literal["finish", "cancel"]
"""What becomes of running requests when the weights change."""
ScoreMethod: TypeAlias = Literal["prefill", "decode"]
"""How a given answer is scored; see :meth:`k3vl.lm.local.LocalBackend.score`."""


@dataclass(slots=True, kw_only=True)
class Token:
    """One generated token; not frozen, for that would double what it costs.

    Attributes:
        id: token id; None when generation ended without another token.
        finish: set on the last: ``stop`` (a stop id, which is ``id``) or ``length``.
        cached_tokens: prompt tokens of the request that did not have to be computed.
        logprobs: where the request asked for them.
    """

    id: int | None
    finish: Literal["stop", "length"] | None = None
    cached_tokens: int = 0
    logprobs: TokenLogprob | None = None


class Encoder(Protocol):
    """Turns media into features; see :mod:`k3vl.lm.encoding` for who calls it, on which threads."""

    def encode(self, items: Sequence[EncoderItem]) -> list[torch.Tensor]:
        """Features [num_tokens, D] of every item, in order."""


class Backend(Protocol):
    """Runs the language model."""

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        sink: Callable[[Token | K3VLError], None],
    ) -> int:
        """Start a generation.

        Args:
            prompt: token ids and media.
            sampling: how to choose and when to stop.
            sink: called on the backend's thread with every token and, at most once and last, with
                an error. It must not block.

        Returns:
            The request's number.

        Raises:
            CapacityError: the request can never run.
            BackendError: the engine is dead.
        """

    def cancel(self, request_id: int) -> None:
        """Stop a generation; its sink gets ``Cancelled``. Unknown or ended requests are ignored."""

    def close(self) -> None:
        """Cancel everything and release the model."""


@runtime_checkable
class ReportsStats(Protocol):
    """What a backend may also do: tell of its caches, memory and times."""

    def stats(self) -> EngineStats:
        """Counters, and what is held now; safe on any thread."""


@runtime_checkable
class HoldsFeatures(Protocol):
    """What a backend may also do: say which media it has encoded already."""

    def holds_features(self, digest: str) -> bool:
        """Whether a media item would not have to be encoded now; safe on any thread."""


@runtime_checkable
class Scores(Protocol):
    """What a backend may also do: tell how likely a given answer is."""

    def score(
        self,
        prompt: Prompt,
        token_ids: Sequence[int],
        sink: Callable[[Token | K3VLError], None],
        *,
        method: ScoreMethod = "prefill",
    ) -> int:
        """Deliver every token with its log-probability; returns the request's number."""


@runtime_checkable
class TakesWeights(Protocol):
    """What a backend may also do: go on with other weights without a restart."""

    def update(self, model: K3Model, encoder: Encoder, *, in_flight: InFlight = "finish") -> None:
        """Returns when they are in use."""
