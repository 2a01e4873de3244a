"""The figures beside a chat: latency, rate, token counts, what the encoder cache saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k3vl.app.chat_demo.history import Answer
    from k3vl.types import Usage

SHORTEST = 0.01
"""Seconds below which a rate would be a matter of the clock."""
_DASH = "&ndash;"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What is known of an answer, in the making or done.

    Attributes:
        ttft: seconds from the request to the first text; None before it.
        rate: tokens per second behind the first; None before the second.
        exact: whether counts come from the engine; while streaming they count pieces of text.
        completion: tokens written.
        usage: the engine's counts; None before the end.
        cached_items, items: media items of the request whose features were there already, and all.
    """

    ttft: float | None
    rate: float | None
    exact: bool
    completion: int
    usage: Usage | None
    cached_items: int
    items: int


def figures(answer: Answer, now: float, *, cached_items: int = 0, items: int = 0) -> Figures:
    """Sum up an answer at a moment of its own clock."""
    until = now if answer.ended_at is None else answer.ended_at
    usage = answer.usage
    completion = answer.pieces if usage is None else usage.completion_tokens
    rate = None
    if answer.first_at is not None and completion > 1:
        since = until - answer.first_at
        rate = (completion - 1) / since if since >= SHORTEST else None
    return Figures(
        ttft=None if answer.first_at is None else answer.first_at - answer.started,
        rate=rate,
        exact=usage is not None,
        completion=completion,
        usage=usage,
        cached_items=cached_items,
        items=items,
    )


def figures_html(known: Figures | None) -> str:
    """A small table; dashes where nothing is known yet."""
    if known is None:
        known = figures_of_nothing()
    about = "" if known.exact else "~"
    usage = known.usage
    cells = [
        ("first token", _DASH if known.ttft is None else _seconds(known.ttft)),
        ("tokens / s", _DASH if known.rate is None else f"{about}{known.rate:.0f}"),
        ("answer", f"{about}{known.completion}" if known.completion else _DASH),
        ("thinking", _count(usage, "reasoning_tokens")),
        ("prompt", _count(usage, "prompt_tokens")),
        ("image", _count(usage, "image_tokens")),
        ("video", _count(usage, "video_tokens")),
        ("cached", _count(usage, "cached_tokens")),
    ]
    tiles = "".join(
        f'<div class="k3-tile"><span class="k3-value">{value}</span>'
        f'<span class="k3-label">{label}</span></div>'
        for label, value in cells
    )
    hits = f"{known.cached_items} of {known.items}" if known.items else _DASH
    return (
        f'<div class="k3-figures">{tiles}</div>'
        f'<div class="k3-line">Encoder cache: <b>{hits}</b> media items reused</div>'
    )


def figures_of_nothing() -> Figures:
    """Before the first question."""
    return Figures(
        ttft=None, rate=None, exact=True, completion=0, usage=None, cached_items=0, items=0
    )


def _count(usage: Usage | None, name: str) -> str:
    return _DASH if usage is None else str(getattr(usage, name))


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"
