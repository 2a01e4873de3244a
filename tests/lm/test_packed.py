"""Routed experts that stay in 4 bits: the same model, and how they are loaded."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from k3vl.checkpoint import CheckpointReader
from k3vl.checkpoint_writer import save_checkpoint
from k3vl.config import load_config
from k3vl.errors import WeightError
from k3vl.lm.batch import Row
from k3vl.lm.weights import load_model, stored_tensors
from k3vl.synthetic import slice_config, write_slice
from tests.process import run_check
from tests.tiny import COMPILED, CPU, REFERENCE, Runner, tokens

if TYPE_CHECKING:
    from k3vl.kernels.choice import Kernels
    from k3vl.lm.model import K3Model

CHECK = Path(__file__).with_name("packed_check.py")
DECODING = replace(REFERENCE, latent_moe_mxfp4=None)
EXPERT = "language_model.model.layers.3.block_sparse_moe.experts.5"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mxfp4")
    write_slice(directory, slice_config(5, tiny=True), seed=3, max_shard_bytes=1 << 17)
    return directory


def load(directory: Path, kernels: Kernels, dtype: torch.dtype = torch.float32) -> K3Model:
    reader = CheckpointReader(directory)
    config = load_config(directory).text
    return load_model(reader, config, kernels, dtype=dtype, device=CPU)


def logits(model: K3Model) -> torch.Tensor:
    """Of 40 tokens of a prompt, then of one more."""
    runner, ids = Runner(model, page_size=16), tokens(41)
    first = Row(token_ids=ids[:40], context_len=0, slot=0, pages=[0, 1, 2])
    last = Row(token_ids=ids[40:], context_len=40, slot=0, pages=[0, 1, 2])
    return torch.cat([runner.run([first], all_logits=True), runner.run([last])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_experts_are_the_decoded_ones_to_the_bit(checkpoint, dtype):
    packed, decoded = load(checkpoint, REFERENCE, dtype), load(checkpoint, DECODING, dtype)
    assert (packed.experts, decoded.experts) == ("mxfp4", "float")
    assert torch.equal(logits(packed), logits(decoded))


def test_kernels_without_4_bits_get_decoded_experts(checkpoint):
    compiled = load(checkpoint, COMPILED)
    assert compiled.experts == "float"
    want = logits(load(checkpoint, REFERENCE))
    assert (logits(compiled) - want).norm() / want.norm() < 1e-5


def test_packed_experts_take_17_bytes_for_32_weights(checkpoint):
    model = load(checkpoint, REFERENCE)
    count, latent, inner = 16, 64, 32
    held = sum(buffer.nbytes for name, buffer in model.named_buffers())
    assert held == 4 * count * 3 * latent * inner * 17 // 32
    assert not any(".w13" in name or ".w2" in name for name, _ in model.named_parameters())


def test_the_way_back_gives_the_checkpoint(checkpoint, tmp_path):
    model = load(checkpoint, REFERENCE)
    back = stored_tensors(model)
    reader = CheckpointReader(checkpoint)
    packed = [name for name in reader.shards if name.startswith(EXPERT)]
    assert len(packed) == 6
    for name in packed:
        with reader._open(reader.shards[name]) as file:
            assert torch.equal(back[name], file.get_tensor(name))
    save_checkpoint(tmp_path, back, json_files={})
    config = load_config(checkpoint).text
    again = load_model(
        CheckpointReader(tmp_path), config, REFERENCE, dtype=torch.float32, device=CPU
    )
    assert again.experts == "mxfp4"
    assert torch.equal(logits(again), logits(model))


# ---------------------------------------------------------------------- what is refused


def changed(checkpoint: Path, directory: Path, **tensors: torch.Tensor | None) -> Path:
    """The checkpoint with other tensors of one expert, in one file; None drops a tensor."""
    reader = CheckpointReader(checkpoint)
    stored = {}
    for name, shard in reader.shards.items():
        with reader._open(shard) as file:
            stored[name] = file.get_tensor(name)
    for name, tensor in tensors.items():
        full = f"{EXPERT}.{name.replace('__', '.')}"
        stored.pop(full, None)
        if tensor is not None:
            stored[full] = tensor
    content = json.loads((checkpoint / "config.json").read_text())
    save_checkpoint(directory, stored, json_files={"config.json": content})
    return directory


def test_a_scale_that_cannot_be_decoded_names_file_and_tensor(checkpoint, tmp_path):
    scale = torch.full((32, 2), 120, dtype=torch.uint8)
    scale[4, 1] = 129
    directory = changed(checkpoint, tmp_path, w3__weight_scale=scale)
    with pytest.raises(WeightError, match="up has a scale byte of 129") as caught:
        load(directory, REFERENCE)
    assert f"model.safetensors: {EXPERT}.w3.weight_packed: " in str(caught.value)
    assert load(directory, DECODING).experts == "float", "floats can hold it"


def test_a_scale_that_is_not_a_number_is_refused(checkpoint, tmp_path):
    scale = torch.full((64, 1), 255, dtype=torch.uint8)
    directory = changed(checkpoint, tmp_path, w2__weight_scale=scale)
    with pytest.raises(WeightError, match=r"w2.weight_scale: 64 of 64 scales are not numbers"):
        load(directory, REFERENCE)


def test_packed_matrices_of_another_shape_are_refused(checkpoint, tmp_path):
    packed, scale = torch.zeros(64, 32, dtype=torch.uint8), torch.zeros(64, 2, dtype=torch.uint8)
    directory = changed(checkpoint, tmp_path, w1__weight_packed=packed, w1__weight_scale=scale)
    with pytest.raises(WeightError, match=r"w1.weight is \[64, 64\] \(mxfp4\).*needs \[32, 64\]"):
        load(directory, REFERENCE)


def test_a_missing_matrix_is_named(checkpoint, tmp_path):
    directory = changed(checkpoint, tmp_path, w1__weight_packed=None, w1__weight_scale=None)
    with pytest.raises(WeightError, match=r"1 tensor \(.*experts.5.w1.weight\) missing"):
        load(directory, REFERENCE)


def test_one_plain_matrix_makes_all_of_them_floats(checkpoint, tmp_path):
    plain = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    directory = changed(
        checkpoint, tmp_path, w1__weight_packed=None, w1__weight_scale=None, w1__weight=plain
    )
    model = load(directory, REFERENCE)
    assert model.experts == "float"
    assert torch.equal(model.layers[3].mlp.w13[5, :32], plain.float())


# ---------------------------------------------------------------------- memory, and the device


def run(what: str, *args: str, interpret: bool = False) -> dict[str, float]:
    """In a process of its own: memory is the process's."""
    return json.loads(run_check(CHECK, what, *args, interpret=interpret).splitlines()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_holds_neither_floats_nor_a_layer_twice(tmp_path):
    """Own memory on the way is the packed experts; mapped files are one shard at a time."""
    content = slice_config(4, tiny=True, experts=128)
    content["text_config"] |= {"moe_intermediate_size": 1024, "routed_expert_hidden_size": 256}
    write_slice(tmp_path, content, max_shard_bytes=24 << 20)
    packed, decoded = run("memory", str(tmp_path), "packed"), run("memory", str(tmp_path), "float")
    experts = 3 * 128 * 3 * 1024 * 256 * 17 // 32
    assert packed["experts"] == experts
    assert packed["own"] < experts + (16 << 20), "no second copy of a layer (53 MB)"
    assert packed["mapped"] < 32 << 20, "a shard is unmapped before the next one"
    assert decoded["own"] > 3.5 * experts, "what decoding to bfloat16 takes"


def test_triton_on_packed_experts_is_the_reference(tmp_path):
    """A whole K3 in Triton's interpreter: prefill of one and more tokens, decode, idle experts."""
    pytest.importorskip("triton")
    write_slice(tmp_path, slice_config(3, tiny=True))
    assert run("triton", str(tmp_path), interpret=True)["error"] < 2e-5
