"""How an engine over two processes begins and ends: nobody is left behind, or waits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import k3vl.lm.engine as engine_module
from k3vl import load
from k3vl.config import DEMO_CHECKPOINT, parse_config
from k3vl.errors import BackendError, ConfigError, K3VLError, WeightError
from k3vl.lm.engine import Engine
from k3vl.lm.local import LocalBackend
from k3vl.lm.mirrored import lead, require_ranks
from k3vl.pipeline import Pipeline
from k3vl.synthetic import slice_config
from k3vl.types import EncoderItem, MediaPart, MediaSpan, Message, SamplingParams, TextPart
from tests import rank_parts
from tests.process import ROOT
from tests.rank_parts import SOON, ask, ids_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from k3vl.lm.mirrored import LeadingEngine


def test_the_demo_model_says_what_it_sees_on_two_ranks() -> None:
    """Through the whole pipeline: weights of 8 bits, and a picture that both encode."""
    picture = MediaPart("image", ROOT / "examples" / "fox-kite-bus.png")
    messages = [Message(role="user", parts=(TextPart("Describe this."), picture))]
    with Pipeline.load("demo", device="cpu", tensor_parallel=2) as pipeline:
        assert pipeline.reply(messages).content == "A fox, a kite and a bus."
        again = pipeline.reply(messages)
        assert again.usage.cached_tokens > 0
        assert again.content == "A fox, a kite and a bus."
        with pytest.raises(ConfigError, match="2 ranks share"):
            pipeline.update_weights(DEMO_CHECKPOINT)


def test_steps_that_are_launched_ahead_are_the_same_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drawn tokens too: a checksum that is off by one would end the engine."""
    monkeypatch.setattr(engine_module, "decoder", engine_module.decoder)  # put back at the end
    leading = lead(2, rank_parts.build_recorded, "cpu")
    parts = rank_parts.build_recorded(None)
    single = Engine(parts.model, parts.encoder, parts.config, stop_ids=())
    found = []
    for engine in (single, leading):
        backend = LocalBackend(engine)
        sinks = [
            ask(backend, 40, n, max_tokens=20 + 7 * n, temperature=float(n % 2), seed=n)
            for n in range(4)
        ]
        leaving = ask(backend, 20, 9, max_tokens=500)
        leaving.events.get(timeout=SOON)
        backend.cancel(4)
        found.append([ids_of(sink.rest()) for sink in sinks])
        backend.close()
    assert found[0] == found[1]


# ---------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (rank_parts.build_damaged, WeightError, "rank 1 of 2: model.safetensors: damaged"),
        (rank_parts.build_wrong, BackendError, "rank 1 of 2: ZeroDivisionError: a bug"),
        (rank_parts.build_killed, BackendError, r"rank 1 of 2: its process ended \(-9\)"),
    ],
)
def test_a_rank_that_cannot_begin_is_heard(
    build: Callable[..., Any], error: type[K3VLError], message: str
) -> None:
    with pytest.raises(error, match=message):
        lead(2, build, "cpu")
    assert not dist.is_initialized()


def test_a_first_rank_that_cannot_begin_leaves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    with pytest.raises(ConfigError, match="3 ranks: num_attention_heads is 4"):
        lead(3, rank_parts.build, "cpu")
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


def test_ranks_meet_wherever_temporary_files_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "50 % of #1?"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    lead(2, rank_parts.build, "cpu").close()
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("generation_config.json", {"min_confidence": "high"}, "min_confidence must be"),
        ("preprocessor_config.json", {"fixed_output_tokens": 64}, "fixed_output_tokens is 64"),
    ],
)
def test_what_is_refused_is_refused_before_anything_starts(
    name: str,
    content: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine of which nobody knows has nobody who closes it."""
    for file in DEMO_CHECKPOINT.iterdir():
        if file.name != name:
            (tmp_path / file.name).symlink_to(file)
    stored = json.loads((DEMO_CHECKPOINT / name).read_text())
    part = stored.get("media_proc_cfg", stored)
    part |= content
    (tmp_path / name).write_text(json.dumps(stored))
    monkeypatch.setattr(load, "start_engine", lambda *_: pytest.fail("it has started"))
    with pytest.raises(ConfigError, match=message):
        Pipeline.load(tmp_path, device="cpu", tensor_parallel=2)


@pytest.fixture
def fragile() -> Iterator[tuple[LeadingEngine, LocalBackend]]:
    engine = lead(2, rank_parts.build, "cpu")
    backend = LocalBackend(engine)
    yield engine, backend
    backend.close()
    assert all(p.poll() is not None for p in engine.followers._processes.values())
    assert not dist.is_initialized()
    assert not [t for t in threading.enumerate() if t in engine.followers._threads]


@pytest.mark.parametrize("busy", [True, False])
def test_a_rank_that_dies_ends_the_engine(
    fragile: tuple[LeadingEngine, LocalBackend], busy: bool
) -> None:
    engine, backend = fragile
    if busy:
        sink = ask(backend, 20, max_tokens=400)
        sink.events.get(timeout=SOON)
    for process in engine.followers._processes.values():
        process.kill()
        process.wait()
    if not busy:
        sink = ask(backend, 20, max_tokens=400)
    with pytest.raises(BackendError, match=r"rank 1 of 2: its process ended \(-9\)"):
        sink.rest()
    with pytest.raises(BackendError, match="the engine stopped"):
        ask(backend, 20)


def test_a_rank_that_alone_cannot_encode_ends_the_engine() -> None:
    """It would leave out a request that the others run, and their sums would not fit."""
    backend = LocalBackend(lead(2, rank_parts.build_blind, "cpu"))
    seen = EncoderItem("a", np.zeros((4, 3, 14, 14), np.uint8), (1, 2, 2), 1)
    sink = rank_parts.Sink()
    given = replace(rank_parts.prompt(30), spans=(MediaSpan(4, seen),))
    backend.submit(given, SamplingParams(max_tokens=4), sink)
    with pytest.raises(BackendError, match="rank 1 of 2: the vision tower failed"):
        sink.rest()
    backend.close()


def test_ranks_that_disagree_are_found_out(fragile: tuple[LeadingEngine, LocalBackend]) -> None:
    engine, backend = fragile
    assert len(ask(backend, 20, max_tokens=2).rest()) == 2
    engine.digest ^= 1
    with pytest.raises(BackendError, match="rank 1 of 2: its tokens are not those of rank 0"):
        ask(backend, 20, max_tokens=40).rest()


def test_a_first_rank_that_is_killed_leaves_nobody() -> None:
    program = (
        "import time; from k3vl.lm.mirrored import lead; from tests import rank_parts\n"
        "engine = lead(2, rank_parts.build, 'cpu')\n"
        "print(*[p.pid for p in engine.followers._processes.values()], flush=True)\n"
        "time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    leading = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, stdout=subprocess.PIPE
    )
    assert leading.stdout is not None
    with leading.stdout as out:
        other = int(out.readline())
        os.kill(other, 0)
        leading.send_signal(signal.SIGKILL)
        leading.wait()
        end = time.monotonic() + SOON
        while time.monotonic() < end and _runs(other):
            time.sleep(0.05)
    assert not _runs(other)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:  # one that has ended waits for its new parent, which may not care
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    require_ranks(2, torch.device("cuda"))
    require_ranks(8, torch.device("cpu"))
    with pytest.raises(ConfigError, match="3 ranks: each has a GPU of its own, torch sees 2"):
        require_ranks(3, torch.device("cuda"))


def test_what_all_ranks_hold_counts_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """K3's tower, embedding, routers, latent and low-rank projections; the smallest GPU decides."""
    k3 = parse_config(slice_config(93))
    on_all = load.bytes_on_all(k3, torch.bfloat16)
    assert 14.5e9 < on_all < 15e9
    free = {None: 90, 0: 90, 1: 80, 2: 100}
    monkeypatch.setattr(load, "available_memory", lambda device: free[device.index])
    assert load.memory_of_ranks(torch.device("cuda"), 3, 10) == 3 * 80 - 2 * 10
    assert load.memory_of_ranks(torch.device("cpu"), 3, 10) == 90 - 2 * 10
    monkeypatch.setattr(load, "available_memory", lambda device: 60 << 20)
    with pytest.raises(ConfigError, match=r"short.*; the embedded engine holds 2 devices' worth"):
        Pipeline.load("demo", device="cpu", tensor_parallel=2)
