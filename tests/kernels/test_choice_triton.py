"""CUDA devices get the Triton kernels where their blocks have the memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from k3vl.kernels.choice import SHARED_MEMORY, choose
from k3vl.kernels.kda.layer import ComposedKDA
from k3vl.kernels.vision import REFERENCE


@pytest.mark.parametrize(
    ("memory", "name"), [(SHARED_MEMORY, "triton"), (SHARED_MEMORY - 1, "reference")]
)
def test_the_choice_on_cuda_follows_the_memory_of_a_block(
    memory: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    properties = SimpleNamespace(shared_memory_per_block_optin=memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    kernels = choose(torch.device("cuda"), torch.bfloat16)
    assert kernels.name == name
    assert (kernels.vision is REFERENCE) == (name == "reference")
    if name == "triton":
        assert isinstance(kernels.kda, ComposedKDA)
        ops = (kernels.kda.kda_decode, kernels.kda.kda_prefill, kernels.attn_residual)
        for op in ops:
            assert op.__module__.endswith(".gpu")


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("3.5.1", "reference"),
        ("3.6.0", "triton"),
        ("3.9.2+git1", "triton"),
        ("3.10.0", "reference"),
    ],
)
def test_only_a_triton_that_was_compared_compiles_the_kernels(
    version: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    properties = SimpleNamespace(shared_memory_per_block_optin=SHARED_MEMORY)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(triton, "__version__", version)
    kernels = choose(torch.device("cuda"), torch.bfloat16)
    assert kernels.name == name
    if name == "reference":
        number = version[: version.rindex(".")]
        assert kernels.reason.endswith(f"with Triton 3.6 to 3.9, this is {number}")


def test_a_cpu_has_a_tower_of_its_own_for_float32() -> None:
    compiled = choose(torch.device("cpu"), torch.float32).vision
    assert all(type(op).__module__.endswith(".cpu") for op in (compiled.block, compiled.linear))
    assert choose(torch.device("cpu"), torch.bfloat16).vision is REFERENCE
