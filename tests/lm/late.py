"""Stand-ins on a CPU for a device that runs behind the host."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import torch

from k3vl.kernels.recording import EagerRunner
from k3vl.lm import decode, decode_inputs
from k3vl.lm.batch import build_batch
from k3vl.lm.decode import DirectDecode, StaticDecode
from k3vl.lm.sampler import SamplingPlan, num_words, pack, sample, settle


class LateDecode(DirectDecode):
    """Steps as :class:`DirectDecode` makes them, whose tokens are told when they are asked for."""

    overlaps = True
    ahead = 0
    """Steps that were launched before the tokens of the last one were known."""

    def launch(self, rows, choosers, *, sources=None):
        if sources is not None:
            self.ahead += 1
            assert all(row.token_ids == (-1,) for row in rows)
            rows = [
                replace(row, token_ids=[self._last[source]])
                for row, source in zip(rows, sources, strict=True)
            ]
        logits = self.model(build_batch(rows, self.cache), self.cache)
        asks = [chooser.ask() for chooser in choosers]
        plan = SamplingPlan.of(asks)
        params = torch.tensor([ask.numbers for ask in asks], dtype=torch.float64)
        bits = torch.zeros(len(asks), num_words(logits.shape[-1]), dtype=torch.int32)
        pack(asks, bits.numpy())
        sampled = ids = sample(logits, params, bits, plan) if asks else torch.zeros(0)
        if ids.dim() == 2:
            ids = ids[:, 0].long()
        self._last = ids.tolist()
        return _Told(sampled, asks, choosers, logits)


class _Told:
    def __init__(self, sampled, asks, choosers, logits) -> None:
        self.given = sampled, asks, choosers
        self.logits = logits

    def tokens(self) -> list[int]:
        for row, chooser in zip(self.logits, self.given[2], strict=True):
            if hasattr(chooser, "logits"):
                chooser.logits.append(row.clone())
        return settle(*self.given)


class Stream:
    """Work in its order, done when somebody waits for it, and not before."""

    def __init__(self) -> None:
        self.given, self.done, self._work = 0, 0, deque()

    def put(self, work) -> None:
        self._work.append(work)
        self.given += 1

    def come_to(self, place: int) -> None:
        while self.done < place:
            self._work.popleft()()
            self.done += 1

    def drain(self) -> None:
        self.come_to(self.given)

    def behind(self, function):
        """What reads or writes the same memory by itself: everything before it is done first."""

        def after(*args, **kwargs):
            self.drain()
            return function(*args, **kwargs)

        return after


class StreamRunner(EagerRunner):
    """Steps that are done again, each when the stream comes to it."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def make(self, step):
        self.stream.drain()
        again = super().make(step)
        out = again()

        def later():
            self.stream.put(again)
            return out

        return later


def on_a_stream(monkeypatch, engine) -> Stream:
    """Decode as on a device: copies, steps and results wait in a stream until they are needed.

    Everything else that touches the cache waits for the stream, as it would in it.
    """
    stream = Stream()

    class Place:
        def __init__(self) -> None:
            self.place = stream.given

        def synchronize(self) -> None:
            stream.come_to(self.place)

    send, carry = decode_inputs.Staged.send, decode._carry

    def launch(self, turn):
        sampled = self._step()
        if not self._results:
            self._results = [torch.full_like(sampled, -1) for _ in range(2)]
        result = self._results[turn]
        stream.put(lambda: result.copy_(sampled))
        return result

    monkeypatch.setattr(decode_inputs.Staged, "send", lambda *args: stream.put(lambda: send(*args)))
    monkeypatch.setattr(decode, "_carry", lambda *args: stream.put(lambda: carry(*args)))
    monkeypatch.setattr(decode._Sampling, "launch", launch)
    monkeypatch.setattr(decode, "mark", lambda device: Place())
    monkeypatch.setattr("k3vl.lm.prompts.build_batch", stream.behind(build_batch))
    cache = engine.cache
    for name in ("clear", "copy", "write_units", "read_units", "write_features", "read_features"):
        setattr(cache, name, stream.behind(getattr(cache, name)))
    engine.decoder = StaticDecode(engine.model, cache, StreamRunner(stream))
    return stream
