"""Bars as an SVG file: small, without a library, the same bytes for the same numbers."""

from __future__ import annotations

from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, TOP = 860, 230, 130, 56
BAR, GAP, GROUP = 15, 3, 24
OURS_COLOUR, PEER_COLOUR, LINE, TEXT = "#1f5fbf", "#c9a25b", "#d9d9d9", "#222222"


@dataclass(frozen=True, slots=True)
class Bar:
    """One of a group: its name, its length from 0 to 1, what is written behind it."""

    name: str
    share: float
    text: str
    ours: bool


def draw(title: str, axis: str, groups: list[tuple[str, list[Bar]]], caption: list[str]) -> str:
    """Groups of horizontal bars over an axis from 0 to 100 %."""
    ends = [GROUP + len(bars) * (BAR + GAP) for _, bars in groups]
    bottom = TOP + sum(ends) + 8
    height = bottom + 44 + 16 * len(caption)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="DejaVu Sans, Verdana, sans-serif" '
        f'font-size="11" fill="{TEXT}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(16, 26, title, size=15, weight="bold"),
    ]
    for percent in range(0, 101, 20):
        x = _across(percent / 100)
        out.append(f'<path d="M{x:.1f} {TOP - 8}V{bottom}" stroke="{LINE}"/>')
        out.append(_text(x, bottom + 14, f"{percent} %", anchor="middle"))
    out.append(_text(_across(0.5), bottom + 32, axis, anchor="middle"))
    y = TOP
    for (label, bars), end in zip(groups, ends, strict=True):
        out.append(_text(16, y + 12, label, weight="bold"))
        for i, bar in enumerate(bars):
            out += _bar(bar, y + 18 + i * (BAR + GAP))
        y += end
    out += [_text(16, bottom + 54 + 16 * i, line) for i, line in enumerate(caption)]
    return "\n".join([*out, "</svg>\n"])


def _across(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _bar(bar: Bar, y: float) -> list[str]:
    length = min(bar.share, 1.0) * (WIDTH - LEFT - RIGHT)
    colour = OURS_COLOUR if bar.ours else PEER_COLOUR
    return [
        _text(LEFT - 8, y + 11.5, bar.name, anchor="end"),
        f'<rect x="{LEFT}" y="{y:g}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>',
        _text(LEFT + length + 6, y + 11.5, bar.text),
    ]


def _text(
    x: float, y: float, text: str, *, anchor: str = "", weight: str = "", size: int = 0
) -> str:
    named = {"text-anchor": anchor, "font-weight": weight, "font-size": size}
    given = "".join(f' {name}="{value}"' for name, value in named.items() if value)
    return f'<text x="{x:.1f}" y="{y:g}"{given}>{escape(text)}</text>'
