"""What the ranks of tests build, each in its own process, and what goes wrong there."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from k3vl.config import parse_config
from k3vl.errors import WeightError
from k3vl.kernels.choice import reference_kernels
from k3vl.lm.engine import EngineConfig
from k3vl.lm.mirrored import EngineParts
from k3vl.lm.ranks import split_kernels
from k3vl.synthetic import random_model, slice_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3vl.config import TextConfig
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
