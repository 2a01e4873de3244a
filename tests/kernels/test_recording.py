"""Streams of recorded steps; what a device does with them is in ``test_recording_device.py``."""

from __future__ import annotations

import gc
from itertools import count
from weakref import WeakSet

import pytest

from k3vl.kernels import recording


class Stream:
    """As of torch: of few that there are, in turn; a weak reference would not know of its end."""

    __slots__ = ("cuda_stream",)
    device, made = "cuda:0", count()

    def __init__(self, device: object = None) -> None:
        self.cuda_stream = next(self.made) % recording._POOL


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.Stream", Stream)
    monkeypatch.setattr(recording, "_owned", WeakSet())


def test_a_stream_is_nobody_elses_for_as_long_as_it_is_held() -> None:
    kept = recording.OwnStream()
    for _ in range(3 * recording._POOL):
        Stream()  # somebody's who does not mind
        assert recording.OwnStream().stream.cuda_stream != kept.stream.cuda_stream


def test_one_that_is_in_a_circle_comes_back() -> None:
    class Holder:
        def __init__(self) -> None:
            self.itself, self.stream = self, recording.OwnStream()

    for _ in range(recording._POOL):
        Holder()
    assert recording.OwnStream() is not None


def test_more_than_there_are_is_refused() -> None:
    held = [recording.OwnStream() for _ in range(recording._POOL)]
    assert len({own.stream.cuda_stream for own in held}) == recording._POOL
    gc.collect()
    with pytest.raises(RuntimeError, match="32 streams"):
        recording.OwnStream()
