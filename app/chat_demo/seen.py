"""What the model sees: the processor's own pictures with the patch grid drawn over them.

The pictures are exactly the patches that go into the vision tower, put together again: upright,
resized, alpha over the chessboard, padding included. Counts come from the processor, never from a
formula here.
"""

from __future__ import annotations

import html
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw

from k3vl.app.sent_media import upright_png
from k3vl.vision.processor import model_view
from k3vl.vision.sniff import HEAD_BYTES, sniff
from k3vl.vision.source import read_path

if TYPE_CHECKING:
    from pathlib import Path

    from k3vl.types import ProcessedMedia

MAX_FRAMES_SHOWN = 48
_SHOWN_BY_BROWSERS = frozenset(
    {"JPEG", "PNG", "GIF", "WEBP", "BMP", "AVIF", "mov", "matroska", "ogg"}
)
_SMALL = 640  # below this side a picture is enlarged, so that the grid leaves it visible
_FAINT, _STRONG = (255, 255, 255, 56), (20, 184, 166, 190)


@dataclass(frozen=True, slots=True)
class Seen:
    """One file as the model gets it.

    Attributes:
        pictures: each with its caption.
        facts: HTML of sizes and counts.
    """

    pictures: tuple[tuple[Image.Image, str], ...]
    facts: str


def see(name: str, media: ProcessedMedia, *, patch: int) -> Seen:
    """Show a file as it was processed.

    Args:
        name: the file's.
        media: from the processor.
        patch: side of a patch in pixels; 2 x 2 patches become one token.
    """
    views = model_view(media)[:MAX_FRAMES_SHOWN]
    times = media.frame_times or (None,)
    pictures = tuple(
        (with_grid(view, patch), name if at is None else f"{_clock(at)}  frame {number}")
        for number, (view, at) in enumerate(zip(views, times, strict=False), start=1)
    )
    return Seen(pictures, _facts(name, media, views[0].size, shown=len(views)))


def stand_in(path: Path, media: ProcessedMedia) -> Path | None:
    """A PNG beside a file that browsers cannot show; None where they can.

    Args:
        path: the file; lies in the upload's own folder, which is cleared with it.
        media: what was made of it; of a clip its middle frame is shown.
    """
    kind = sniff(read_path(path, HEAD_BYTES))
    if kind.decoder in _SHOWN_BY_BROWSERS:
        return None
    if media.layout.kind == "image":
        data = upright_png(read_path(path))
    else:
        views = model_view(media)
        stream = io.BytesIO()
        views[len(views) // 2].save(stream, "PNG")
        data = stream.getvalue()
    picture = path.with_name(f"{path.stem}.k3vl.png")
    picture.write_bytes(data)
    return picture


def with_grid(picture: Image.Image, patch: int) -> Image.Image:
    """Draw faint lines between patches and strong ones between tokens (2 x 2 patches)."""
    factor = 2 if max(picture.size) <= _SMALL else 1
    size = (picture.width * factor, picture.height * factor)
    enlarged = picture.resize(size, Image.Resampling.NEAREST).convert("RGBA")
    lines = Image.new("RGBA", size, (0, 0, 0, 0))
    draw = ImageDraw.Draw(lines)
    step = patch * factor
    for token in (False, True):  # the strong ones on top
        colour = _STRONG if token else _FAINT
        for number in range(1, max(size) // step):
            if (number % 2 == 0) is token:
                draw.line([(number * step, 0), (number * step, size[1])], fill=colour)
                draw.line([(0, number * step), (size[0], number * step)], fill=colour)
    return Image.alpha_composite(enlarged, lines).convert("RGB")


def _facts(name: str, media: ProcessedMedia, size: tuple[int, int], *, shown: int) -> str:
    layout = media.layout
    tokens = sum(group.num_tokens for group in layout.groups)
    _, rows, columns = media.items[0].grid_thw
    facts = [
        ("upright", f"{layout.width} &times; {layout.height} px"),
        ("as the model gets it", f"{size[0]} &times; {size[1]} px"),
        ("patches", f"{columns} &times; {rows}"),
        ("tokens", f"<b>{tokens}</b>"),
    ]
    if layout.kind == "video":
        frames = len(media.frame_times)
        more = f" (first {shown} shown)" if shown < frames else ""
        stamps = ", ".join(group.timestamp or "" for group in layout.groups[:6])
        more_stamps = ", &hellip;" if len(layout.groups) > 6 else ""
        facts += [
            ("frames used", f"{frames}{more}"),
            ("groups of four", f"{len(layout.groups)}"),
            ("group clocks", stamps + more_stamps),
        ]
    listed = "".join(f"<dt>{term}</dt><dd>{value}</dd>" for term, value in facts)
    notes = "".join(f'<p class="k3-warn">{html.escape(note)}</p>' for note in media.warnings)
    return f'<div class="k3-facts"><h4>{html.escape(name)}</h4><dl>{listed}</dl>{notes}</div>'


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{seconds % 60:06.3f}"
