"""Video files through PyAV: streams, clocks, rotation, damage; frames converted only when chosen.

Rules of this file: the frames are chosen from presentation times before any of them is converted;
decoding is linear (no seek, so no late landing); one frame besides the current one is held. Only
the demuxer that the first bytes call for may open a file, so playlists and scripts that refer to
other files are never followed. Audio, subtitles and cover art are ignored.

Colours: the stream's matrix and range are honoured; HDR (PQ, HLG) is converted without tone
mapping and says so; an alpha plane is dropped; interlaced frames stay woven.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from contextlib import contextmanager
from io import BytesIO
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import av
import numpy as np
from av.sidedata.sidedata import Type as SideData
from av.stream import Disposition
from av.video.reformatter import Interpolation, VideoReformatter
from PIL import Image

from k3vl.errors import MediaError
from k3vl.vision.animation import AnimationClip
from k3vl.vision.image import check_image, open_image
from k3vl.vision.sniff import HEAD_BYTES, Sniffed, sniff
from k3vl.vision.source import read_path
from k3vl.vision.timeline import Clip, ClipFrame, Moment, Timeline, repair_times

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k3vl.vision.limits import MediaLimits

_AV_ERRORS = (av.FFmpegError, ValueError, OSError)
_IO_BYTES = 1 << 18
# Tags that are not UTF-8 must not cost a clip. PyAV 19 keeps them as they are, and takes no order.
_OPENING: dict[str, Any] = (
    {"metadata_errors": "ignore"} if int(av.__version__.partition(".")[0]) < 19 else {}
)
# PQ and HLG of ITU-T H.273.
_HDR_TRANSFERS = {16: "PQ", 18: "HLG"}
_SCALER = (
    Interpolation.BICUBIC
    | Interpolation.FULL_CHR_H_INT
    | Interpolation.ACCURATE_RND
    | Interpolation.BITEXACT
)
# Signs of the display matrix's a, b, c, d: a stored pixel (x, y) is shown at
# (a*x + c*y, b*x + d*y), y downwards.
_UPRIGHT = {
    (1, 0, 0, 1): None,
    (-1, 0, 0, 1): Image.Transpose.FLIP_LEFT_RIGHT,
    (1, 0, 0, -1): Image.Transpose.FLIP_TOP_BOTTOM,
    (-1, 0, 0, -1): Image.Transpose.ROTATE_180,
    (0, 1, -1, 0): Image.Transpose.ROTATE_270,
    (0, -1, 1, 0): Image.Transpose.ROTATE_90,
    (0, 1, 1, 0): Image.Transpose.TRANSPOSE,
    (0, -1, -1, 0): Image.Transpose.TRANSVERSE,
}
_SIDEWAYS = (
    Image.Transpose.ROTATE_90,
    Image.Transpose.ROTATE_270,
    Image.Transpose.TRANSPOSE,
    Image.Transpose.TRANSVERSE,
)
_MAX_ASPECT = 16.0


@contextmanager
def open_video(source: bytes | Path, limits: MediaLimits) -> Iterator[Clip]:
    """Recognise and measure a clip: its upright size and when its frames are shown.

    Raises:
        MediaError: codes ``video_empty``, ``not_a_video``, ``image_as_video``,
            ``no_video_stream``, ``video_codec_unsupported``, ``video_corrupt``,
            ``video_too_large``, ``video_too_long``, ``video_too_many_frames``, ``video_timeout``.
    """
    head = read_path(source, HEAD_BYTES) if isinstance(source, Path) else source[:HEAD_BYTES]
    kind = check_video(head)
    if kind.family == "image":
        data = read_path(source) if isinstance(source, Path) else source
        if not _is_animated(data, kind, limits):
            raise MediaError(
                f"not a video: a still {kind.name} picture; send it as an image",
                code="image_as_video",
            )
        yield AnimationClip(data, limits)
        return
    yield ContainerClip(source, kind, limits)


def check_video(head: bytes) -> Sniffed:
    """Recognise a clip or an animated picture by its first bytes.

    Raises:
        MediaError: as :func:`open_video`.
    """
    if not head:
        raise MediaError("video: the file is empty (0 bytes)", code="video_empty")
    kind = sniff(head)
    if kind.family == "audio":
        raise MediaError(f"no video stream: this is {kind.name} audio", code="no_video_stream")
    if kind.family == "other":
        raise MediaError(
            f"not a video that can be read: looks like {kind.name}", code="not_a_video"
        )
    return kind


def _is_animated(data: bytes, kind: Sniffed, limits: MediaLimits) -> bool:
    """GIF counts as a clip even with one frame; the others need two."""
    if kind.decoder in ("JPEG", "TIFF"):
        return False
    check_image(data, limits)
    return kind.decoder == "GIF" or getattr(open_image(data, kind), "n_frames", 1) > 1


class ContainerClip:
    """A :class:`~k3vl.vision.timeline.Clip` over a container file.

    The file is read up to three times: for the first frame (size, rotation), for the packets'
    times, and for the chosen frames. Files without usable packet times are decoded twice.
    """

    def __init__(self, source: bytes | Path, kind: Sniffed, limits: MediaLimits) -> None:
        self._source = source
        self._kind = kind
        self._limits = limits
        self._deadline = time.monotonic() + limits.max_decode_seconds
        self._notes: list[str] = []
        self._first_at: float | None = None
        self._clock: tuple[float, ...] | None = None  # by frame number, where packets lack times
        self._origin = 0.0
        self._num_moments = self._num_substituted = self._num_resized = 0
        self.num_damaged = 0
        self._probe()
        self.timeline = self._measure()

    # ------------------------------------------------------------------ measuring

    def _probe(self) -> None:
        """Decode the first frame: stored size, rotation, aspect, colour."""
        with self._container(threads=False) as (container, stream):  # more would wait for more
            first, self._first_at = next(self._decode(container, stream), (None, None))
            aspect = stream.sample_aspect_ratio or stream.codec_context.sample_aspect_ratio
        if first is None:
            raise MediaError(f"{self._kind.name}: no frame can be decoded", code="video_corrupt")
        self._turn = self._read_turn(first)
        self.stored = (first.width, first.height)
        self.width, self.height = self._display_size(aspect)
        if (transfer := _HDR_TRANSFERS.get(int(first.color_trc))) is not None:
            self._notes.append(f"HDR ({transfer}) shown without tone mapping")
        if first.interlaced_frame:
            self._notes.append("interlaced, fields left woven")
        self.num_damaged = 0

    def _read_turn(self, frame: Any) -> Image.Transpose | None:
        """How to turn stored frames upright."""
        side_data = frame.side_data.get(SideData.DISPLAYMATRIX)
        if side_data is None:
            return None
        matrix = np.frombuffer(bytes(side_data), np.int32).astype(np.float64) / 65536
        linear = matrix[[0, 1, 3, 4]]
        signs = tuple(int(np.sign(v)) if abs(v) > 0.5 * np.abs(linear).max() else 0 for v in linear)
        if signs not in _UPRIGHT:
            self._notes.append("rotated by an angle that is no quarter turn, left as stored")
            return None
        return _UPRIGHT[signs]

    def _display_size(self, aspect: Any) -> tuple[int, int]:
        """Upright size with square pixels; only the width is changed for the aspect."""
        width, height = self.stored
        if aspect and aspect != 1:
            if 1 / _MAX_ASPECT <= aspect <= _MAX_ASPECT:
                width = max(1, round(width * aspect))
            else:
                self._notes.append(f"sample aspect ratio {aspect} makes no sense, ignored")
        return (height, width) if self._turn in _SIDEWAYS else (width, height)

    def _measure(self) -> Timeline:
        """Find out when frames are shown, without converting any."""
        with self._container() as (container, stream):
            rates = [
                float(rate)
                for rate in (stream.average_rate, stream.guessed_rate, stream.base_rate)
                if rate
            ]
            tick = float(stream.time_base or 0)
            stamps = self._packet_times(container, stream)
        times = self._decoded_times(rates) if stamps is None else stamps
        # What lies before time 0 (an edit list's lead-in) or before the first frame that decodes (a
        # stream joined late) is not shown.
        shown = [at for at in times if at >= 0] or list(times)
        if stamps is not None and self._first_at is not None:
            shown = [at for at in shown if at >= self._first_at] or shown
        if not shown:
            raise MediaError(f"{self._kind.name}: no frame can be decoded", code="video_corrupt")
        self._origin = shown[0]
        length = shown[-1] - shown[0]
        if length > self._limits.max_video_seconds:
            raise MediaError(
                f"the clip lasts {length:.1f} s, at most {self._limits.max_video_seconds:g} s are "
                "accepted",
                code="video_too_long",
            )
        self.num_damaged = 0
        return Timeline.build(shown, rates, tick)

    def _decoded_times(self, rates: Sequence[float]) -> Sequence[float]:
        """Presentation times of all frames that decode, repaired where they make no sense."""
        with self._container() as (container, stream):
            raw = [at for _, at in self._decode(container, stream)]
        self._clock, num_repaired = repair_times(raw, rates[0] if rates else 25.0)
        if num_repaired:
            self._notes.append(f"{num_repaired} of {len(raw)} frame times repaired")
        return self._clock

    def _packet_times(self, container: Any, stream: Any) -> list[float] | None:
        """Presentation times of all packets that are shown; None where they cannot be trusted."""
        # AVI knows the decoding order alone; VP8 has packets that are never shown.
        if self._kind.decoder == "avi" or stream.codec_context.name in ("vp8", "libvpx"):
            return None
        tick = float(stream.time_base or 0)
        stamps: list[int] = []
        last_dts = None
        for packet in self._packets(container, stream):
            if packet.is_discard:
                continue
            if packet.pts is None:
                return None
            if last_dts is not None and packet.dts is not None and packet.dts < last_dts:
                return None
            last_dts = packet.dts
            stamps.append(packet.pts)
        stamps.sort()
        if not tick or not stamps or any(a == b for a, b in pairwise(stamps)):
            return None
        return [stamp * tick for stamp in stamps]

    # ------------------------------------------------------------------ reading

    @contextmanager
    def _container(self, *, threads: bool = True) -> Iterator[tuple[Any, Any]]:
        """Open the file anew and pick the stream."""
        file = self._source.open("rb") if isinstance(self._source, Path) else BytesIO(self._source)
        with contextlib.ExitStack() as stack:
            stack.enter_context(file)
            try:
                container = av.open(
                    file, format=self._kind.decoder, buffer_size=_IO_BYTES, **_OPENING
                )
            except _AV_ERRORS as exc:
                raise MediaError(
                    f"{self._kind.name} file cannot be opened: damaged or incomplete",
                    code="video_corrupt",
                ) from exc
            stack.enter_context(container)
            stream = self._pick_stream(container)
            stream.codec_context.options = {"max_pixels": str(self._limits.max_frame_pixels)}
            stream.thread_type = "AUTO" if threads else "NONE"
            if threads:
                try:
                    stream.codec_context.open(strict=False)
                except BlockingIOError:  # the system has no more threads now
                    stream.thread_type = "NONE"
                except _AV_ERRORS:
                    pass  # and again with the first packet
            yield container, stream

    def _pick_stream(self, container: Any) -> Any:
        """The largest real video stream, the default one first; never cover art."""
        cover = Disposition.attached_pic | Disposition.timed_thumbnails
        streams = [s for s in container.streams.video if not s.disposition & cover]
        if not streams:
            raise MediaError(
                f"no video stream in this {self._kind.name} file", code="no_video_stream"
            )
        usable = [s for s in streams if s.codec_context is not None]
        if not usable:
            raise MediaError(
                f"no decoder for the video stream of this {self._kind.name} file",
                code="video_codec_unsupported",
            )
        best = max(
            usable,
            key=lambda s: (
                s.frames != 1,  # cover art that nobody marked as such
                bool(s.disposition & Disposition.default),
                s.codec_context.width * s.codec_context.height,
            ),
        )
        width, height = best.codec_context.width, best.codec_context.height
        if width * height > self._limits.max_frame_pixels:
            raise MediaError(
                f"frames of {width} x {height} pixels, at most {self._limits.max_frame_pixels} "
                "pixels are accepted",
                code="video_too_large",
            )
        return best

    def _packets(self, container: Any, stream: Any) -> Iterator[Any]:
        """The stream's packets, within the limits; an unreadable rest counts as one damage."""
        packets = container.demux(stream)
        for number in range(self._limits.max_source_frames + 2):
            if time.monotonic() > self._deadline:
                raise MediaError(
                    f"decoding takes longer than {self._limits.max_decode_seconds:g} s",
                    code="video_timeout",
                )
            try:
                packet = next(packets)
            except StopIteration:
                return
            except _AV_ERRORS:
                self.num_damaged += 1
                return
            if packet.size == 0:  # the mark that flushes the decoder
                continue
            if number >= self._limits.max_source_frames:
                raise MediaError(
                    f"more than {self._limits.max_source_frames} frames",
                    code="video_too_many_frames",
                )
            yield packet

    def _decode(self, container: Any, stream: Any) -> Iterator[tuple[Any, float | None]]:
        """Every frame that decodes, in presentation order, with the file's seconds for it.

        Damaged packets are counted and skipped.
        """
        tick = float(stream.time_base or 0)
        for packet in chain(self._packets(container, stream), (None,)):
            try:
                decoded = stream.codec_context.decode(packet)  # None flushes the decoder
            except _AV_ERRORS:
                self.num_damaged += 1
                continue
            for frame in decoded:
                yield frame, None if frame.pts is None or not tick else frame.pts * tick

    # ------------------------------------------------------------------ the chosen frames

    def frames(self, moments: Sequence[Moment], *, threads: bool) -> Iterator[ClipFrame]:
        """Convert the frame nearest to each moment; a frame is given once.

        Raises:
            MediaError: nothing could be decoded, or the time limit passed.
        """
        self.num_damaged = self._num_substituted = self._num_resized = 0
        self._num_moments = len(moments)
        pending = deque(moments)
        reformatter = VideoReformatter()
        before: tuple[Any, float] | None = None
        given: Any = None
        with self._container(threads=threads) as (container, stream):
            for frame, at in self._timed(self._decode(container, stream)):
                while pending and at >= pending[0].at:
                    moment = pending.popleft()
                    exact = at == moment.at
                    nearer = before is None or at - moment.at <= moment.at - before[1]
                    chosen, shown = (frame, at) if exact or nearer or before is None else before
                    self._num_substituted += not exact
                    if chosen is not given:
                        given = chosen
                        time_shown = moment.time if exact else shown
                        yield ClipFrame(self._convert(chosen, reformatter), time_shown)
                before = (frame, at)
                if not pending:
                    return
        self._num_substituted += len(pending)
        if before is None:
            raise MediaError(f"{self._kind.name}: no frame can be decoded", code="video_corrupt")
        if before[0] is not given:
            yield ClipFrame(self._convert(before[0], reformatter), before[1])

    def _timed(self, frames: Iterator[tuple[Any, float | None]]) -> Iterator[tuple[Any, float]]:
        """Frames with their seconds from the first shown one; earlier ones are left out."""
        last = -1.0
        for number, (frame, stamp) in enumerate(frames):
            if self._clock is not None:
                stamp = self._clock[number] if number < len(self._clock) else None
            if stamp is None:
                continue
            at = stamp - self._origin
            if at >= 0 and at > last:
                last = at
                yield frame, at

    def _convert(self, frame: Any, reformatter: VideoReformatter) -> Image.Image:
        """Upright RGB in the stored aspect."""
        if (frame.width, frame.height) != self.stored:
            self._num_resized += 1
        wanted: dict[str, Any] = {
            "format": "rgb24",
            "src_color_range": frame.color_range,
            "interpolation": _SCALER,
        }
        try:
            rgb = reformatter.reformat(frame, **wanted)
        except BlockingIOError:  # the system has no more threads now
            rgb = VideoReformatter().reformat(frame, **wanted, threads=1)
        image = Image.fromarray(rgb.to_ndarray())
        return image if self._turn is None else image.transpose(self._turn)

    def warnings(self) -> tuple[str, ...]:
        """What was repaired, ignored or lost, after :meth:`frames` has ended."""
        notes = list(self._notes)
        if self.num_damaged:
            notes.append(f"{self.num_damaged} damaged packets left out")
        if self._num_substituted:
            notes.append(
                f"{self._num_substituted} of {self._num_moments} chosen frames could not be "
                "decoded, the nearest good ones were used"
            )
        if self._num_resized:
            notes.append(
                f"the size changes during the clip, {self._num_resized} frames fitted to the first"
            )
        return tuple(notes)
