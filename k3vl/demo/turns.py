"""What is said in a training conversation: questions, answers, tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call as the model writes it."""

    tool: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """One question with its answer.

    Attributes:
        task: what is asked, for shares and scores.
        thought: what a thinking model may note first.
        calls: tool calls that come before the answer, in one message without text.
        results: what the tools return, one text for each call; () ends the turn with the calls.
        notice: kind and body of the template's own message behind the question (tool choice,
            response format).
    """

    task: str
    question: str
    answer: str
    thought: str = ""
    calls: tuple[Call, ...] = ()
    results: tuple[str, ...] = ()
    notice: tuple[str, str] | None = None
