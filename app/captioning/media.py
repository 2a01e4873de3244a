"""From a listed source to decoded media: fetching, digests, pages and clips.

What a file is and how it is decoded is ``k3vl.vision``'s business; here is only the choice of what
to ask it for.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3vl.app.captioning.items import WHOLE, FsspecFile, Item, Piece, Source
from k3vl.app.captioning.pages import Pages
from k3vl.app.captioning.rows import Seen
from k3vl.app.extras import needs_extra
from k3vl.errors import MediaError
from k3vl.types import MediaPart
from k3vl.vision.image import DECODER_ERRORS, check_image, open_image
from k3vl.vision.inspect import kind_of
from k3vl.vision.plan import frame_budget, plan_frame
from k3vl.vision.sniff import HEAD_BYTES, sniff
from k3vl.vision.source import read_path, resolve
from k3vl.vision.timeline import Moment, Timeline
from k3vl.vision.video import open_video

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL.Image import Image

    from k3vl.types import MediaKind, ProcessedMedia
    from k3vl.vision.limits import MediaLimits
    from k3vl.vision.processor import MediaProcessor
    from k3vl.vision.timeline import Clip

FIRST_PAGE = Pages()
_HASH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """A source's bytes, not yet decoded.

    Attributes:
        data: the bytes, or a local clip that is better left on the disk.
        kind: what they are.
        digest: SHA-256 of them, in hex.
    """

    data: bytes | Path
    kind: MediaKind
    digest: str

    def whole(self, limit: int) -> bytes | None:
        """The bytes; None for more than ``limit``."""
        if isinstance(self.data, bytes):
            return self.data if len(self.data) <= limit else None
        return read_path(self.data) if self.data.stat().st_size <= limit else None


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """An item's media, ready for an engine.

    Attributes:
        fetched: where they came from.
        piece: which part.
        media: patches and layout.
        seen: what rows say of them.
        page: the picture itself where it is a later page of a file.
    """

    fetched: Fetched
    piece: Piece
    media: ProcessedMedia
    seen: Seen
    page: Image | None = None


class MediaLoader:
    """Fetches and decodes; safe on any thread.

    Args:
        processor: settings, limits and fetch policy.
        pages: what is taken of files with several pictures.
        clip_seconds: cut clips into pieces of this length; None leaves them whole.
    """

    def __init__(
        self,
        processor: MediaProcessor,
        *,
        pages: Pages = FIRST_PAGE,
        clip_seconds: float | None = None,
    ) -> None:
        self._processor = processor
        self._pages = pages
        self._clip_seconds = clip_seconds

    # ------------------------------------------------------------------ which items

    def expand(self, source: Source) -> Iterator[Item]:
        """A source's items; one that cannot be opened is one item, whose loading tells why."""
        if source.error is None and (self._pages.kind != "first" or self._clip_seconds is not None):
            try:
                pieces = self._pieces(self.fetch(source))
            except MediaError:
                pieces = [WHOLE]
        else:
            pieces = [WHOLE]
        for piece in pieces:
            yield Item(source, piece)

    def _pieces(self, fetched: Fetched) -> list[Piece]:
        if fetched.kind == "image" and self._pages.kind != "first":
            count = self._count_pages(fetched)
            if count > 1 and self._pages.kind == "clip":
                return [Piece(animated=True)]
            if count > 1:
                # Where none of the listed is there, the first of them tells so when it is loaded.
                numbers = self._pages.numbers(count) or [self._pages.ranges[0][0]]
                return [Piece(page=number) for number in numbers]
        if fetched.kind == "video" and self._clip_seconds is not None:
            with open_video(fetched.data, self._processor.limits) as clip:
                return _windows(clip.timeline, self._clip_seconds)
        return [WHOLE]

    def _count_pages(self, fetched: Fetched) -> int:
        data = fetched.data
        assert isinstance(data, bytes)
        kind = check_image(data, self._processor.limits)
        image = open_image(data, kind)
        try:
            count = int(getattr(image, "n_frames", 1))
        except DECODER_ERRORS:
            return 1
        # A clip needs frames that follow each other; pages of a document do not.
        return 1 if self._pages.kind == "clip" and kind.decoder in ("TIFF", "JPEG") else count

    # ------------------------------------------------------------------ bytes

    def fetch(self, source: Source) -> Fetched:
        """Get the bytes and look at the first of them.

        Raises:
            MediaError: they cannot be had.
        """
        if source.error is not None:
            raise source.error
        media = source.media
        assert media is not None
        if isinstance(media, Path):
            return self._local(media)
        if isinstance(media, FsspecFile):
            media = _open_fsspec(media, self._processor.policy.max_bytes)
        data = resolve(media, "image", self._processor.policy)
        assert isinstance(data, bytes)
        return Fetched(data, _kind(data[:HEAD_BYTES]), hashlib.sha256(data).hexdigest())

    def _local(self, path: Path) -> Fetched:
        kind = kind_of(path)
        resolve(path, kind, self._processor.policy)
        if kind == "image":
            data = read_path(path)
            return Fetched(data, kind, hashlib.sha256(data).hexdigest())
        digest = hashlib.sha256()
        try:
            with path.open("rb") as file:
                while chunk := file.read(_HASH_BYTES):
                    digest.update(chunk)
        except OSError as exc:
            raise MediaError(f"{path.name}: cannot be read", code="media_not_found") from exc
        return Fetched(path, kind, digest.hexdigest())

    # ------------------------------------------------------------------ pixels

    def decode(self, fetched: Fetched, piece: Piece) -> Loaded:
        """Decode and cut into patches.

        Raises:
            MediaError: as :meth:`MediaProcessor.process`.
        """
        page = None
        if piece.page is not None:
            page = self._page(fetched, piece.page)
            media = self._processor.process(page)
        elif piece.start is not None and piece.end is not None:
            media = self._window(fetched, piece.start, piece.end)
        else:
            kind = "video" if piece.animated else fetched.kind
            media = self._processor.process(MediaPart(kind, fetched.data))
        seen = Seen(
            kind=media.layout.kind,
            width=media.layout.width,
            height=media.layout.height,
            frame_times=media.frame_times,
            digest=fetched.digest,
            warnings=media.warnings,
        )
        return Loaded(fetched, piece, media, seen, page)

    def _page(self, fetched: Fetched, number: int) -> Image:
        data = fetched.data
        assert isinstance(data, bytes)
        image = open_page(data, number, self._processor.limits)
        try:
            return image.copy()
        except DECODER_ERRORS as exc:
            raise MediaError(f"page {number} cannot be read", code="image_corrupt") from exc

    def _window(self, fetched: Fetched, start: float, end: float) -> ProcessedMedia:
        """A part of a clip; its frames keep the times that they have in the whole."""
        frames = list(chosen_frames(fetched, Piece(start=start, end=end), self._processor))
        return self._processor.process_frames(
            [image for image, _ in frames], [at for _, at in frames]
        )


def chosen_frames(
    fetched: Fetched, piece: Piece, processor: MediaProcessor
) -> Iterator[tuple[Image, float]]:
    """The frames of a clip, or of a piece of one, that the processor's rules choose.

    Args:
        fetched: the whole clip.
        piece: which part of it.
        processor: its settings are the rules.

    Yields:
        Upright frames in display aspect, with their seconds in the whole clip.

    Raises:
        MediaError: it cannot be decoded, or has no frame there.
    """
    start, end = piece.start or 0.0, piece.end
    with open_video(fetched.data, processor.limits) as clip:
        times = [at for at in clip.timeline.times if start <= at and (end is None or at < end)]
        if not times:
            raise MediaError(f"no frame between {start:g} s and {end:g} s", code="video_corrupt")
        plan = plan_frame(clip.width, clip.height, processor.config)
        budget = frame_budget(plan, processor.config, processor.limits)
        inside = Timeline(tuple(at - times[0] for at in times), clip.timeline.fps)
        moments = [
            Moment(times[0] + moment.at, times[0] + moment.time)
            for moment in inside.choose(processor.config.sample_fps, budget)
        ]
        for frame in clip.frames(moments, threads=True):
            yield _in_aspect(frame.image, clip), frame.time


def open_page(data: bytes, number: int, limits: MediaLimits) -> Image:
    """A picture opened at one of its pages, from 1; not decoded yet.

    Raises:
        MediaError: it has no such page, or cannot be read up to there.
    """
    image = open_image(data, check_image(data, limits))
    try:
        count = int(getattr(image, "n_frames", 1))
        if number <= count:
            image.seek(number - 1)
            return image
    except DECODER_ERRORS as exc:
        raise MediaError(f"page {number} cannot be read", code="image_corrupt") from exc
    raise MediaError(f"no page {number}, there are {count}", code="page_missing")


def _kind(head: bytes) -> MediaKind:
    """Sound is a clip that lacks its pictures; all else is a picture or says why it is none."""
    return "video" if sniff(head).family in ("video", "audio") else "image"


def _windows(timeline: Timeline, seconds: float) -> list[Piece]:
    numbers = dict.fromkeys(int(at // seconds) for at in timeline.times)
    return [Piece(start=n * seconds, end=(n + 1) * seconds) for n in numbers]


def _in_aspect(image: Image, clip: Clip) -> Image:
    size = (clip.width, clip.height)
    return image if image.size == size else image.resize(size)


def need_fsspec() -> Any:
    """The optional ``fsspec``.

    Raises:
        ConfigError: it is not installed.
    """
    with needs_extra("caption", "a URL of this kind"):
        import fsspec
    return fsspec


def _open_fsspec(file: FsspecFile, max_bytes: int) -> bytes:
    fsspec = need_fsspec()
    try:
        with fsspec.open(file.url, "rb") as opened:
            data = opened.read(max_bytes + 1)
    except (OSError, ValueError, ImportError) as exc:
        raise MediaError(
            f"{file.url}: cannot be opened ({type(exc).__name__})", code="media_not_found"
        ) from exc
    return bytes(data)


def thumbnail(media: ProcessedMedia, side: int = 192) -> bytes:
    """A small JPEG of what the model sees; of a clip its middle frame."""
    from k3vl.vision.processor import model_view

    views = model_view(media)
    picture = views[len(views) // 2]
    picture.thumbnail((side, side))
    stream = io.BytesIO()
    picture.convert("RGB").save(stream, "JPEG", quality=80)
    return stream.getvalue()
