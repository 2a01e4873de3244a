"""Fakes for the seams; nothing else is ever faked."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from k3vl.errors import BackendError
from k3vl.lm.backend import Token

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3vl.errors import K3VLError
    from k3vl.types import Prompt, SamplingParams


@dataclass
class FakeBackend:
    """Answers every prompt with the same token ids, on a thread of its own.

    Attributes:
        answer: ids to send; the last one finishes.
        finish: how the last one finishes.
        error: sent after the ids, in place of a finish.
        prompts: what was asked.
        cancelled: numbers of cancelled requests.
    """

    answer: list[int]
    finish: str = "stop"
    error: K3VLError | None = None
    prompts: list[tuple[Prompt, SamplingParams]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    closed: bool = False

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        sink: Callable[[Token | K3VLError], None],
    ) -> int:
        self.prompts.append((prompt, sampling))

        def send() -> None:
            items: list[Any] = [Token(id=i) for i in self.answer]
            if self.error is not None:
                items.append(self.error)
            elif items:
                items[-1] = Token(id=self.answer[-1], finish=self.finish)
            for item in items:
                sink(item)

        threading.Thread(target=send).start()
        return len(self.prompts) - 1

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)

    def close(self) -> None:
        self.closed = True


@dataclass
class HeldBackend:
    """Holds every generation until the test sends its tokens.

    Attributes:
        sinks: of the generations that have neither ended nor been cancelled, by number.
        is_dead: refuses everything, as an engine whose thread has ended.
    """

    sinks: dict[int, Callable[[Token | K3VLError], None]] = field(default_factory=dict)
    num_submitted: int = 0
    is_dead: bool = False

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        sink: Callable[[Token | K3VLError], None],
    ) -> int:
        if self.is_dead:
            raise BackendError("the engine stopped after an error (secret detail)")
        self.num_submitted += 1
        self.sinks[self.num_submitted] = sink
        return self.num_submitted

    def send(self, *token_ids: int, finish: str | None = None) -> None:
        """Send tokens to every generation; ``finish`` ends them all."""
        for number, sink in list(self.sinks.items()):
            for token_id in token_ids[:-1]:
                sink(Token(id=token_id))
            if finish:
                self.sinks.pop(number, None)
            sink(Token(id=token_ids[-1], finish=finish))  # type: ignore[arg-type]

    def cancel(self, request_id: int) -> None:
        self.sinks.pop(request_id, None)

    def close(self) -> None:
        self.sinks.clear()
