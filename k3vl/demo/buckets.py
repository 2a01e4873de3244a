"""Kinds of training batches: what they show, at which sizes, and how often they are drawn.

A *bucket* fixes the grid of a picture, the frames of every clip and the row length, so that every
batch of a bucket has the same shapes; all buckets have the same number of language tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

TOKENS = 98_304
"""Language tokens of one step."""

CELL_PIXELS = 28
"""A visual token covers 28 by 28 pixels."""

STILL = (1,)
"""The groups of a picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Shapes of one kind of batch.

    Attributes:
        height, width: of the padded grid, pixels.
        row: tokens of a row.
        share: how often it is drawn.
        media: frames of every group of every picture (:data:`STILL`) and clip of a conversation.
        chat: they are shown in messages of their own, one after the other; else all in the first.
        thinking: share of conversations with the think channel.
        charts: pictures are bar charts.
        tools: conversations declare tools.
        early: used from the start, before the full mix.
    """

    name: str
    height: int
    width: int
    row: int
    share: int
    media: tuple[tuple[int, ...], ...] = (STILL,)
    chat: bool = False
    thinking: float = 0.0
    charts: bool = False
    tools: bool = False
    early: bool = False

    @property
    def frames(self) -> tuple[int, ...]:
        """Frames of every picture and clip of a row."""
        return tuple(sum(groups) for groups in self.media)

    @property
    def visual(self) -> int:
        """Visual tokens of one picture or group."""
        return self.height * self.width // CELL_PIXELS**2

    @property
    def runs(self) -> tuple[int, ...]:
        """Frames of every picture and group of a row."""
        return tuple(chain.from_iterable(self.media))


def _clip(*groups: int) -> tuple[tuple[int, ...], ...]:
    return (groups,)


def _chat(
    name: str,
    size: tuple[int, int],
    row: int,
    share: int,
    media: tuple[tuple[int, ...], ...],
    **more: Any,
) -> Bucket:
    return Bucket(
        name=name,
        height=size[0],
        width=size[1],
        row=row,
        share=share,
        media=media,
        chat=True,
        **more,
    )


_SOME = 0.3  # of conversations think where rows have room
_FOUR = (4,)
_PAIR = (STILL, STILL)
BUCKETS = (
    Bucket(name="img224", height=224, width=224, row=192, share=25),
    Bucket(name="think224", height=224, width=224, row=256, share=8, thinking=1.0),
    Bucket(name="tool168", height=168, width=168, row=768, share=7, thinking=_SOME, tools=True),
    Bucket(name="land", height=168, width=224, row=192, share=6),
    Bucket(name="port", height=224, width=168, row=192, share=5),
    Bucket(name="wide", height=112, width=336, row=192, share=2),
    Bucket(name="tall", height=336, width=112, row=192, share=2),
    Bucket(name="big", height=336, width=448, row=384, share=3, thinking=_SOME),
    Bucket(name="img448", height=448, width=448, row=384, share=3),
    Bucket(name="img140", height=140, width=140, row=128, share=5),
    Bucket(name="img112", height=112, width=112, row=128, share=6, early=True),
    Bucket(name="img84", height=84, width=84, row=64, share=3, early=True),
    Bucket(name="img56", height=56, width=56, row=64, share=1),
    Bucket(name="chart224", height=224, width=224, row=192, share=5, charts=True),
    Bucket(name="chart336", height=224, width=336, row=256, share=2, thinking=_SOME, charts=True),
    Bucket(name="pair168", height=168, width=168, row=192, share=8, media=_PAIR),
    Bucket(name="pair224", height=224, width=224, row=256, share=3, media=_PAIR),
    Bucket(
        name="trio112", height=112, width=112, row=192, share=2, thinking=_SOME, media=(STILL,) * 3
    ),
    Bucket(name="vid112", height=112, width=112, row=128, share=5, media=_clip(4)),
    Bucket(name="vid112x2", height=112, width=112, row=256, share=5, media=_clip(4, 4)),
    Bucket(name="vid112x4", height=112, width=112, row=384, share=3, media=_clip(4, 4, 4, 4)),
    Bucket(name="vid168", height=168, width=224, row=256, share=2, media=_clip(4)),
    Bucket(name="vid168x2", height=168, width=224, row=512, share=2, media=_clip(4, 4)),
    Bucket(name="vid112tail2", height=112, width=112, row=192, share=2, media=_clip(4, 2)),
    Bucket(name="vid112tail1", height=112, width=112, row=256, share=1, media=_clip(4, 4, 1)),
    Bucket(name="vid112short", height=112, width=112, row=128, share=1, media=_clip(3)),
    Bucket(
        name="vidthink", height=112, width=112, row=256, share=2, media=_clip(4, 4), thinking=1.0
    ),
    # Pictures and clips come one after the other.
    _chat("chat112x2", (112, 112), 256, 3, _PAIR),
    _chat("chat168x2", (168, 168), 384, 6, _PAIR, thinking=_SOME),
    _chat("chat224x2", (224, 224), 384, 5, _PAIR),
    _chat("chat168x3", (168, 168), 512, 4, (STILL,) * 3, thinking=_SOME),
    _chat("chat112x4", (112, 112), 384, 3, (STILL,) * 4),
    _chat("chattool", (168, 168), 1024, 2, _PAIR, thinking=_SOME, tools=True),
    _chat("chatchart", (168, 224), 384, 1, _PAIR, charts=True),
    _chat("chatclips", (112, 112), 256, 2, (_FOUR, _FOUR)),
    _chat("chatclip1", (112, 112), 256, 2, (STILL, _FOUR)),
    _chat("chatclip2", (112, 112), 256, 2, (_FOUR, STILL)),
)
"""All of them."""
