"""The contact sheet: one HTML file without outside parts, for a look over a run's captions.

Failures come first, then captions beside small pictures of what the model saw. Of a long run a
sample is shown, drawn evenly over the whole of it, so the page stays one that a browser opens.
"""

from __future__ import annotations

import base64
import html
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3vl.app.captioning.durable import cannot_write, write_whole
from k3vl.app.captioning.progress import rate
from k3vl.app.output import printable

if TYPE_CHECKING:
    from pathlib import Path

    from k3vl.app.captioning.rows import Row
    from k3vl.app.captioning.run import Counts

SHOWN = 300
"""Captions, and failures, on a sheet."""
_STYLE = """
:root { color-scheme: light dark; --line: #d8dbe2; --soft: #667085; --bad: #b42318;
  --card: #ffffff; --page: #f5f6f8; --ink: #1a1d23; }
@media (prefers-color-scheme: dark) { :root { --line: #343a46; --soft: #98a2b3; --bad: #f97066;
  --card: #1c2029; --page: #12151b; --ink: #e7eaf0; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 2rem clamp(1rem, 4vw, 3rem); background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .25rem; }
h2 { font-size: 1.05rem; margin: 2rem 0 .75rem; }
.soft { color: var(--soft); margin: 0; overflow-wrap: anywhere; }
dl.facts { display: flex; flex-wrap: wrap; gap: .75rem 2.25rem; margin: 1.25rem 0 0; }
dl.facts div { min-width: 5rem; }
dl.facts dt { color: var(--soft); font-size: .8rem; }
dl.facts dd { margin: 0; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
dl.facts .bad dd { color: var(--bad); }
.sheet { display: grid; grid-template-columns: repeat(auto-fill, minmax(215px, 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  overflow: hidden; display: flex; flex-direction: column; }
figure .frame { height: 170px; display: grid; place-items: center; background: #80808018; }
figure img { max-width: 100%; max-height: 170px; display: block; }
figcaption { padding: .7rem .8rem .8rem; display: flex; flex-direction: column; gap: .4rem;
  flex: 1; }
figcaption p { margin: 0; overflow-wrap: anywhere; white-space: pre-line; }
figcaption small { color: var(--soft); overflow-wrap: anywhere; }
figcaption small:first-of-type { margin-top: auto; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 10px;
  background: var(--card); }
table { width: 100%; border-collapse: collapse; }
th, td { text-align: left; padding: .5rem .8rem; vertical-align: top; overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 500; font-size: .8rem; }
tr + tr td { border-top: 1px solid var(--line); }
td:first-child { min-width: 14rem; }
td:nth-child(2) { color: var(--bad); white-space: nowrap; }
"""


@dataclass(frozen=True, slots=True)
class _Shot:
    row: Row
    thumbnail: bytes | None
    number: int


class ContactSheet:
    """Gathers a sample of rows and writes the page."""

    def __init__(self, path: Path, title: str) -> None:
        self._path = path
        self._title = title
        self._captions = _Sample(SHOWN)
        self._failures = _Sample(SHOWN)

    def row(self, row: Row, thumbnail: bytes | None) -> None:
        """See :class:`k3vl.app.captioning.progress.RowWatcher`."""
        (self._failures if "error" in row else self._captions).add(row, thumbnail)

    def write(self, counts: Counts, *, finished: bool) -> None:
        """Write the page; whole, or not at all.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            write_whole(
                self._path, self._page(counts, finished=finished).encode("utf-8", "replace")
            )
        except OSError as exc:
            raise cannot_write(self._path, exc) from exc

    def _page(self, counts: Counts, *, finished: bool) -> str:
        state = "" if finished else " (stopped before its end)"
        parts = [
            "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>",
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<title>{_text(self._title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>Captions</h1><p class='soft'>{_text(self._title)}{state}</p>",
            _facts(counts),
        ]
        if self._failures.shots:
            parts.append(f"<h2>Failures{self._failures.note}</h2>")
            parts.append(
                "<div class='scroll'><table>"
                "<tr><th>Item</th><th>Code</th><th>What happened</th></tr>"
            )
            parts += [_failure(shot.row) for shot in self._failures.in_order()]
            parts.append("</table></div>")
        if self._captions.shots:
            parts.append(f"<h2>Captions{self._captions.note}</h2><div class='sheet'>")
            parts += [_figure(shot) for shot in self._captions.in_order()]
            parts.append("</div>")
        parts.append("</body></html>\n")
        return "".join(parts)


class _Sample:
    """An even sample of a stream of unknown length."""

    def __init__(self, size: int) -> None:
        self.shots: list[_Shot] = []
        self._size = size
        self._seen = 0
        self._random = random.Random(0)  # noqa: S311 - the same run gives the same sheet

    def add(self, row: Row, thumbnail: bytes | None) -> None:
        shot = _Shot(row, thumbnail, self._seen)
        self._seen += 1
        if len(self.shots) < self._size:
            self.shots.append(shot)
        elif (place := self._random.randrange(self._seen)) < self._size:
            self.shots[place] = shot

    def in_order(self) -> list[_Shot]:
        return sorted(self.shots, key=lambda shot: shot.number)

    @property
    def note(self) -> str:
        """How many of how many, where not all are shown."""
        if self._seen == len(self.shots):
            return ""
        return f" <span class='soft'>({len(self.shots)} of {self._seen:,}, evenly drawn)</span>"


def _facts(counts: Counts) -> str:
    failed = counts.failed + counts.failed_before
    facts = [
        ("captioned", f"{counts.captioned:,}", ""),
        ("failed", f"{failed:,}", "bad" if failed else ""),
        ("were there before", f"{counts.skipped:,}", ""),
        ("same content", f"{counts.duplicates:,}", ""),
        ("captions/s", f"{rate(counts):.2f}", ""),
        ("time", _duration(counts.seconds), ""),
        ("tokens written", f"{counts.tokens:,}", ""),
    ]
    cells = "".join(
        f"<div class='{style}'><dt>{name}</dt><dd>{value}</dd></div>"
        for name, value, style in facts
    )
    return f"<dl class='facts'>{cells}</dl>"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def _figure(shot: _Shot) -> str:
    row = shot.row
    picture = "<span class='soft'>no picture</span>"
    if shot.thumbnail is not None:
        data = base64.b64encode(shot.thumbnail).decode()
        picture = f"<img loading='lazy' alt='' src='data:image/jpeg;base64,{data}'>"
    usage = row["usage"]
    media = usage["image_tokens"] + usage["video_tokens"]
    facts = f"{row['width']} x {row['height']}, {media} media tokens, {row['latency']:.2f} s"
    if row["kind"] == "video":
        facts = f"{row['frames']} frames, {facts}"
    if row["finish"] == "length":
        facts += ", cut at the token limit"
    if "duplicate_of" in row:
        facts += f", same content as {_text(row['duplicate_of'])}"
    notes = "".join(f"<small>{_text(warning)}</small>" for warning in row["warnings"])
    return (
        f"<figure><div class='frame'>{picture}</div><figcaption><p>{_text(row['caption'])}</p>"
        f"<small>{_text(row['id'])}</small><small>{facts}</small>{notes}</figcaption></figure>"
    )


def _failure(row: Row) -> str:
    return (
        f"<tr><td>{_text(row['id'])}</td><td>{_text(row['code'])}</td>"
        f"<td>{_text(row['error'])}</td></tr>"
    )


def _text(value: object) -> str:
    """Text for HTML; what is not printable is escaped, line ends stay."""
    return "\n".join(html.escape(printable(line)) for line in str(value).splitlines())
