"""Our text model with Kimi-Linear's configuration against transformers' own ``KimiLinear``.

One file of random float32 weights, read by both: by transformers through its own name mapping.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from k3vl.checkpoint import CheckpointReader
from k3vl.checkpoint_writer import save_checkpoint
from k3vl.lm.batch import Row
from k3vl.lm.weights import load_model, stored_tensors
from tests.tiny import CPU, KIMI_LINEAR, REFERENCE, Runner, tiny_model, tokens

TOLERANCE = 2e-4
"""Logits spread over +-5; what is left is rounding (transformers chunks by 64, we by 16)."""
PREFIX = "language_model."


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Our layout in one folder, Kimi-Linear's (no prefix, its own config) in the other."""
    root = tmp_path_factory.mktemp("kimi_linear")
    stored = {n: t.contiguous() for n, t in stored_tensors(tiny_model(KIMI_LINEAR)).items()}
    save_checkpoint(root / "ours", stored, json_files={})
    (root / "theirs").mkdir()
    bare = {name.removeprefix(PREFIX): tensor.clone() for name, tensor in stored.items()}
    save_file(bare, root / "theirs" / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        **dataclasses.asdict(KIMI_LINEAR),
        "num_key_value_heads": KIMI_LINEAR.num_attention_heads,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    for unknown in ("rope_scaling", "attn_res_block_size", "routed_expert_hidden_size"):
        assert config.pop(unknown) is None
    (root / "theirs" / "config.json").write_text(json.dumps(config))
    return root


@pytest.fixture(scope="module")
def theirs(directory):
    model, report = AutoModelForCausalLM.from_pretrained(
        directory / "theirs", dtype=torch.float32, output_loading_info=True
    )
    assert type(model).__name__ == "KimiLinearForCausalLM"
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model.eval()


@pytest.fixture(scope="module")
def ours(directory):
    reader = CheckpointReader(directory / "ours")
    return load_model(reader, KIMI_LINEAR, REFERENCE, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("length", [1, 16, 61, 200])
def test_prefill_logits_agree(ours, theirs, length) -> None:
    ids = tokens(length, seed=length)
    runner = Runner(ours)
    row = Row(token_ids=ids, context_len=0, slot=0, pages=range(20), pad_to=0)
    found = runner.run([row], all_logits=True)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_decoding_agrees_token_by_token(ours, theirs) -> None:
    ids = tokens(60, seed=3)
    runner = Runner(ours)
    runner.run([Row(token_ids=ids[:40], context_len=0, slot=0, pages=range(10))])
    with torch.no_grad():
        cache = theirs(torch.tensor([ids[:40]]), use_cache=True).cache
        for at in range(40, 60):
            row = Row(token_ids=[ids[at]], context_len=at, slot=0, pages=range(10))
            found = runner.run([row])[0]
            expected = theirs(torch.tensor([[ids[at]]]), cache=cache, use_cache=True).logits[0, -1]
            torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_a_changed_weight_is_noticed(ours, theirs) -> None:
    ids = tokens(30, seed=5)
    row = Row(token_ids=ids, context_len=0, slot=0, pages=range(4))
    gate = theirs.model.layers[1].mlp.gate.weight
    with torch.no_grad():
        before = gate.clone()
        gate.mul_(1.2)
        changed = theirs(torch.tensor([ids])).logits[0]
        gate.copy_(before)
    found = Runner(ours).run([row], all_logits=True)
    assert (found - changed).abs().max() > 10 * TOLERANCE
