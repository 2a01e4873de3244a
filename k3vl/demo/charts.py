"""Bar charts: values, the picture, and questions about it.

A chart is drawn by PIL, for training and for evaluation alike, because its labels are small print.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

from k3vl.demo.atlas import COLOURS
from k3vl.demo.grammar import NUMBERS, listed, sentence
from k3vl.demo.turns import Turn

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

_LABELS = (
    tuple("ABCDEFGHKLMNPRSTUXYZ"),
    ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"),
    ("cat", "dog", "owl", "fox", "bat", "ant", "pig", "cow"),
    ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"),
    ("red", "blue", "pink", "gold", "gray", "cyan"),
)
_PAPERS = ((255, 255, 255), (250, 247, 238), (238, 243, 250), (245, 245, 245))
_INKS = ((20, 20, 20), (60, 60, 70), (30, 40, 80))
_DESCRIBE = (
    "Describe the chart.",
    "What does the chart show?",
    "Describe this.",
    "Read the chart.",
)
_MAX_BARS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Bars from 0 to ``top``; colours are bytes.

    Attributes:
        lying: bars run to the right.
        written: the values stand at the ends of the bars.
        grid: lines across, at every step of the axis.
    """

    labels: tuple[str, ...]
    values: tuple[int, ...]
    colours: tuple[tuple[int, int, int], ...]
    top: int
    lying: bool
    written: bool
    grid: bool
    paper: tuple[int, int, int]
    ink: tuple[int, int, int]
    font: int


def random_chart(rng: random.Random) -> Chart:
    """Two to five bars with different labels; the largest and the smallest value occur once."""
    count = rng.randint(2, _MAX_BARS)
    top = rng.choice((5, 10, 10))
    while True:
        values = tuple(rng.randint(1, top) for _ in range(count))
        if values.count(max(values)) == 1 and values.count(min(values)) == 1:
            break
    labels = rng.choice(_LABELS)
    bars = [rgb for name, rgb in COLOURS.items() if name not in ("white", "yellow")]
    colours = rng.sample(bars, count) if rng.random() < 0.5 else [rng.choice(bars)] * count
    chosen = rng.sample(labels, count)
    if rng.random() < 0.4:
        chosen.sort(key=labels.index)
    return Chart(
        labels=tuple(chosen),
        values=values,
        colours=tuple(colours),
        top=top,
        lying=rng.random() < 0.25,
        written=rng.random() < 0.25,
        grid=rng.random() < 0.7,
        paper=rng.choice(_PAPERS),
        ink=rng.choice(_INKS),
        font=rng.randrange(1 << 20),
    )


@lru_cache(2048)
def _face(path: str, points: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(path, points)


def draw_chart(chart: Chart, width: int, height: int, fonts: Sequence[str]) -> Image.Image:
    """The picture, RGB."""
    image = Image.new("RGB", (width, height), chart.paper)
    draw = ImageDraw.Draw(image)
    points = max(9, round(min(width, height) * 0.066))
    face = _face(fonts[chart.font % len(fonts)], points)
    # The room for the axis labels: beside the axis, and below (or beside) the bars.
    wide = max(face.getlength(label) for label in chart.labels)
    left = round((wide if chart.lying else face.getlength("10")) + points * 0.8)
    bottom = height - round(points * 1.7)
    right, upper = width - round(points * 1.2), round(points * 1.1)
    if chart.lying:
        _lying(draw, chart, face, (left, upper, right, bottom))
    else:
        _standing(draw, chart, face, (left, upper, right, bottom))
    return image


def _faint(chart: Chart) -> tuple[int, int, int]:
    r, g, b = ((3 * p + i) // 4 for p, i in zip(chart.paper, chart.ink, strict=True))
    return r, g, b


def _standing(
    draw: ImageDraw.ImageDraw,
    chart: Chart,
    face: ImageFont.FreeTypeFont,
    box: tuple[int, int, int, int],
) -> None:
    left, upper, right, bottom = box
    unit = (bottom - upper) / chart.top
    for value in range(0, chart.top + 1, 1 if chart.top == _MAX_BARS else 2):
        y = bottom - value * unit
        if chart.grid:
            draw.line((left, y, right, y), _faint(chart))
        draw.text((left - 4, y), str(value), fill=chart.ink, font=face, anchor="rm")
    pitch = (right - left) / len(chart.values)
    bars = zip(chart.labels, chart.values, chart.colours, strict=True)
    for index, (label, value, colour) in enumerate(bars):
        x, y = left + (index + 0.5) * pitch, bottom - value * unit
        draw.rectangle((x - pitch * 0.33, y, x + pitch * 0.33, bottom), fill=colour)
        draw.text((x, bottom + 3), label, fill=chart.ink, font=face, anchor="ma")
        if chart.written:
            draw.text((x, y - 1), str(value), fill=chart.ink, font=face, anchor="mb")
    draw.line((left, upper, left, bottom, right, bottom), chart.ink)


def _lying(
    draw: ImageDraw.ImageDraw,
    chart: Chart,
    face: ImageFont.FreeTypeFont,
    box: tuple[int, int, int, int],
) -> None:
    left, upper, right, bottom = box
    unit = (right - left) / chart.top
    for value in range(0, chart.top + 1, 1 if chart.top == _MAX_BARS else 2):
        x = left + value * unit
        if chart.grid:
            draw.line((x, upper, x, bottom), _faint(chart))
        draw.text((x, bottom + 3), str(value), fill=chart.ink, font=face, anchor="ma")
    pitch = (bottom - upper) / len(chart.values)
    bars = zip(chart.labels, chart.values, chart.colours, strict=True)
    for index, (label, value, colour) in enumerate(bars):
        x, y = left + value * unit, upper + (index + 0.5) * pitch
        draw.rectangle((left, y - pitch * 0.33, x, y + pitch * 0.33), fill=colour)
        draw.text((left - 4, y), label, fill=chart.ink, font=face, anchor="rm")
        if chart.written:
            draw.text((x + 2, y), str(value), fill=chart.ink, font=face, anchor="lm")
    draw.line((left, upper, left, bottom, right, bottom), chart.ink)


# ---------------------------------------------------------------------- questions


def chart_turn(rng: random.Random, chart: Chart) -> Turn:
    """One question about a chart."""
    pairs = list(zip(chart.labels, chart.values, strict=True))
    noted = ", ".join(f"{label} {value}" for label, value in pairs) + "."
    kind = rng.choices(range(6), (30, 18, 12, 18, 8, 14))[0]
    label, value = rng.choice(pairs)
    if kind == 0:
        question = rng.choice(
            (
                f"What is the value of {label}?",
                f"How high is the bar {label}?",
                f"Read the value of {label}.",
                f"Which value does {label} have?",
            )
        )
        return Turn("chart", question, f"{value}.", noted)
    if kind in (1, 2):
        best = max if kind == 1 else min
        label, _ = best(pairs, key=lambda pair: pair[1])
        words = ("tallest", "largest", "highest") if kind == 1 else ("smallest", "lowest")
        question = rng.choice(("Which bar is the {}?", "Which bar has the {} value?"))
        return Turn("chart", question.format(rng.choice(words)), f"{label}.", noted)
    if kind == 3:
        a, b = rng.sample(pairs, 2)
        if a[1] == b[1]:
            return Turn("chart", f"Which is bigger, {a[0]} or {b[0]}?", "They are equal.", noted)
        question = rng.choice(
            (f"Which is bigger, {a[0]} or {b[0]}?",) * 2
            + (f"Which bar is higher, {a[0]} or {b[0]}?",)
        )
        return Turn("chart", question, f"{max(a, b, key=lambda pair: pair[1])[0]}.", noted)
    if kind == 4:
        question = rng.choice(("How many bars are there?", "How many bars does the chart have?"))
        return Turn("chart", question, sentence(NUMBERS[len(pairs)]), noted)
    if rng.random() < 0.3:
        question = rng.choice(("Give the chart as JSON.", "Write the values as JSON."))
        return Turn("chart", question, json.dumps(dict(pairs)), noted)
    text = listed([f"{label} {value}" for label, value in pairs])
    return Turn("chart", rng.choice(_DESCRIBE), f"A bar chart: {text}.", noted)
