"""What the ranks of tests build, each in its own process, and what goes wrong there."""

from __future__ import annotations

import os
import queue
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

import k3vl.lm.engine
from k3vl.config import parse_config
from k3vl.errors import K3VLError, WeightError
from k3vl.kernels.choice import reference_kernels
from k3vl.kernels.recording import EagerRunner
from k3vl.lm.decode import StaticDecode
from k3vl.lm.engine import EngineConfig
from k3vl.lm.mirrored import EngineParts
from k3vl.lm.ranks import split_kernels
from k3vl.synthetic import random_model, slice_config
from k3vl.types import Prompt, SamplingParams
from tests.tiny import tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3vl.config import TextConfig
    from k3vl.lm.backend import Token
    from k3vl.lm.local import LocalBackend
    from k3vl.lm.ranks import Ranks
    from k3vl.types import EncoderItem

LIMITS = EngineConfig(page_size=16, cache_bytes=2**22, num_threads=1)


def config() -> TextConfig:
    """Every kind of layer; packed experts of two ranks have whole groups."""
    return replace(parse_config(slice_config(5, tiny=True)).text, moe_intermediate_size=64)


class NoMedia:
    def encode(self, items: Sequence[EncoderItem]) -> list[torch.Tensor]:
        raise AssertionError(f"{len(items)} media items")


def build(ranks: Ranks | None) -> EngineParts:
    """The same model whole and divided."""
    kernels = reference_kernels("tests")
    if ranks is not None:
        kernels = split_kernels(kernels, ranks)
    device = torch.device("cpu")
    model = random_model(config(), kernels, dtype=torch.float32, device=device, ranks=ranks)
    return EngineParts(model=model, encoder=NoMedia(), config=LIMITS)


def build_recorded(ranks: Ranks | None) -> EngineParts:
    """Steps are launched ahead of their tokens in this process, as they are on a GPU."""
    k3vl.lm.engine.decoder = lambda model, cache: StaticDecode(model, cache, EagerRunner())
    return build(ranks)


def build_damaged(ranks: Ranks) -> EngineParts:
    if ranks.rank:
        raise WeightError("model.safetensors: damaged")
    return build(ranks)


def build_wrong(ranks: Ranks) -> EngineParts:
    if ranks.rank:
        raise ZeroDivisionError("a bug")
    return build(ranks)


def build_killed(ranks: Ranks) -> EngineParts:
    if ranks.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return build(ranks)


class Rows:
    def encode(self, items: Sequence[EncoderItem]) -> list[torch.Tensor]:
        return [torch.zeros(item.num_tokens, config().hidden_size) for item in items]


def build_blind(ranks: Ranks) -> EngineParts:
    """The second rank encodes nothing."""
    parts = build(ranks)
    return parts if ranks.rank else replace(parts, encoder=Rows())


# ---------------------------------------------------------------------- asking

VOCAB = config().vocab_size
SOON = 60.0


class Sink:
    """What a request was given."""

    def __init__(self) -> None:
        self.events: queue.Queue[Token | K3VLError] = queue.Queue()

    def __call__(self, event: Token | K3VLError) -> None:
        self.events.put(event)

    def rest(self) -> list[Token]:
        """All tokens up to the last; raises what ended them else."""
        found = []
        while not found or found[-1].finish is None:
            event = self.events.get(timeout=SOON)
            if isinstance(event, K3VLError):
                raise event
            found.append(event)
        return found


def ids_of(found: list[Token]) -> list[int | None]:
    return [token.id for token in found]


def prompt(length: int, seed: int = 0) -> Prompt:
    return Prompt(token_ids=tuple(tokens(length, seed, VOCAB)))


def ask(backend: LocalBackend, length: int, seed: int = 0, /, **sampling: Any) -> Sink:
    sink = Sink()
    backend.submit(prompt(length, seed), SamplingParams(**sampling), sink)
    return sink
