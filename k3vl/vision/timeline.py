"""A clip's frames in time: repair of broken clocks and the choice of the frames to look at.

No decoder here; ``video.py`` and ``animation.py`` fill it, ``processor.py`` asks it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from k3vl.vision.plan import constant_rate, sample_frames, sample_times

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from PIL.Image import Image

# No codec reorders over more frames than it may keep for reference.
_MAX_REORDER = 16


@dataclass(frozen=True, slots=True)
class Moment:
    """A frame to look at.

    Attributes:
        at: seconds on the file's own clock from the first frame; finds the frame.
        time: seconds to report; index over rate where the rate is constant.
    """

    at: float
    time: float


@dataclass(frozen=True, slots=True, eq=False)
class ClipFrame:
    """One chosen frame, upright; its size is the stored one, not yet the display aspect."""

    image: Image
    time: float


class Clip(Protocol):
    """A file that was opened as a video: measured, not yet converted.

    Attributes:
        width, height: upright display pixels of the first frame.
        timeline: when its frames are shown.
        num_damaged: packets or frames that could not be used, after :meth:`frames` has ended.
    """

    width: int
    height: int
    timeline: Timeline
    num_damaged: int

    def frames(self, moments: Sequence[Moment], *, threads: bool) -> Iterator[ClipFrame]:
        """Decode linearly and convert the frames nearest to the moments."""
        ...

    def warnings(self) -> tuple[str, ...]:
        """What was repaired, ignored or lost so far, in words."""
        ...


@dataclass(frozen=True, slots=True)
class Timeline:
    """When a clip's frames are shown.

    Attributes:
        times: seconds from the first frame, strictly increasing.
        fps: the constant rate, or None where it varies.
    """

    times: tuple[float, ...]
    fps: float | None

    @classmethod
    def build(cls, times: Sequence[float], rates: Sequence[float], tick: float) -> Timeline:
        """Start at the first frame and find out whether the rate is constant."""
        shifted = tuple(time - times[0] for time in times)
        return cls(shifted, constant_rate(shifted, rates, tick))

    def choose(self, sample_fps: float, max_frames: int) -> tuple[Moment, ...]:
        """Choose what to look at; a cap is met by a lower rate over the whole clip."""
        if self.fps is None:
            chosen = sample_times(self.times, sample_fps, max_frames)
            return tuple(Moment(self.times[i], self.times[i]) for i in chosen)
        chosen = sample_frames(len(self.times), self.fps, sample_fps, max_frames)
        return tuple(Moment(self.times[i], i / self.fps) for i in chosen)


def repair_times(times: Sequence[float | None], fps: float) -> tuple[tuple[float, ...], int]:
    """Make a clock strictly increasing; how many times were replaced comes second.

    Frames are in the order in which they are shown. Times that are only shuffled among near
    neighbours, as in containers that know the decoding order alone, are sorted and count as sound.
    Else missing, repeated and backward times are spread evenly between their sound neighbours;
    where more than half are unsound the whole clock is index over ``fps``.
    """
    if (ordered := _unshuffled(times)) is not None:
        return ordered, 0
    sound: list[int] = []
    for index, time in enumerate(times):
        if time is not None and (not sound or time > _at(times, sound[-1])):
            sound.append(index)
    broken = len(times) - len(sound)
    if broken > len(times) // 2:
        return tuple(i / fps for i in range(len(times))), broken
    repaired = []
    for index in range(len(times)):
        right = bisect_left(sound, index)
        if right < len(sound) and sound[right] == index:
            repaired.append(_at(times, index))
        elif right == 0:
            repaired.append(_at(times, sound[0]) - (sound[0] - index) / fps)
        elif right == len(sound):
            repaired.append(_at(times, sound[-1]) + (index - sound[-1]) / fps)
        else:
            low, high = sound[right - 1], sound[right]
            share = (index - low) / (high - low)
            repaired.append(_at(times, low) + share * (_at(times, high) - _at(times, low)))
    return tuple(repaired), broken


def _unshuffled(times: Sequence[float | None]) -> tuple[float, ...] | None:
    """The times in order, if all are there, all differ, and none is far from its place."""
    known = [time for time in times if time is not None]
    order = sorted(range(len(known)), key=known.__getitem__)
    if len(known) < len(times) or any(abs(i - j) > _MAX_REORDER for i, j in enumerate(order)):
        return None
    ordered = tuple(known[i] for i in order)
    return ordered if all(b > a for a, b in pairwise(ordered)) else None


def _at(times: Sequence[float | None], index: int) -> float:
    time = times[index]
    assert time is not None
    return time
