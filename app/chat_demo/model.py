"""What the chat talks to: the one seam between conversations and whoever answers.

The embedded pipeline is one such; ``remote.py`` is another, over HTTP. Both give the same events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from k3vl.types import ChatOptions, Event, Message, SamplingParams
    from k3vl.vision.processor import MediaProcessor


class ChatModel(Protocol):
    """Answers conversations; used on one event loop.

    Attributes:
        name: how it is called.
        defaults: chat options that the settings begin with.
        processor: shows what the model sees, and finds files that cannot be used.
        min_confidence: answers of less are marked; None marks none.
    """

    name: str
    defaults: ChatOptions
    processor: MediaProcessor
    min_confidence: float | None

    def stream(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]],
        options: ChatOptions,
        sampling: SamplingParams,
    ) -> AsyncIterator[Event]:
        """Answer, event by event; closing the iterator ends the generation.

        Raises:
            K3VLError: whatever went wrong; a ``MediaError`` with ``param`` names a file.
        """

    def holds_features(self, digest: str) -> bool | None:
        """Whether a media item is encoded already; None where nobody can tell."""
