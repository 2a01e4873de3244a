"""Numbers of a checkpoint directory, with and without weights."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from k3vl.checkpoint import SINGLE_NAME, CheckpointReader
from k3vl.checkpoint_summary import PARTS, PartSummary, summarise_checkpoint
from k3vl.checkpoint_writer import save_checkpoint
from k3vl.config import K3Config, load_config, parse_config
from k3vl.errors import WeightError
from k3vl.kernels.int8 import quantize_int8
from k3vl.lm import table
from k3vl.vision import weights

GOLDEN = Path(__file__).resolve().parent / "golden"
TINY = GOLDEN / "sglang_tiny"


def expected(config: K3Config, *, quantized: bool = False):
    return {
        **table.expected_tensors(config.text, quantized_experts=quantized),
        **weights.expected_tensors(config.vision),
    }


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(directory)
    with reader._open(SINGLE_NAME) as file:
        return {name: file.get_tensor(name) for name in reader.shards}


@pytest.fixture(scope="module")
def k3_summary(tmp_path_factory):
    config = parse_config(json.loads((GOLDEN / "k3_config.json").read_text()))
    directory = tmp_path_factory.mktemp("k3")
    return summarise_checkpoint(directory, config, expected(config, quantized=True))


def test_the_real_configuration_alone_gives_the_published_numbers(k3_summary):
    assert not k3_summary.weights_present
    assert not k3_summary.complete
    assert k3_summary.tensors == 497_220
    assert k3_summary.nbytes == 1_560_860_324_864
    parts = k3_summary.parts
    assert parts["embedding"].parameters == parts["head"].parameters == 1_174_405_120
    assert parts["vision tower"].parameters + parts["projector"].parameters == 447_358_976
    assert parts["dense MLP"].nbytes == 1_453_326_336
    assert parts["KDA"].nbytes == 69 * 887_800_832
    assert parts["MLA"].nbytes == 24 * 464_392_192
    assert parts["experts"].parameters == 92 * 896 * 33_030_144
    assert parts["experts"].nbytes == 92 * 15_722_348_544
    assert parts["experts"].tensors == 92 * 896 * 6
    always_on = parts["router and latent"].nbytes + parts["shared experts"].nbytes
    assert always_on == 92 * 379_857_408
    assert "other" not in parts
    assert k3_summary.parameters == pytest.approx(2.7795e12 + 0.447e9, rel=1e-4)


def test_kinds_of_layers(k3_summary):
    layers = k3_summary.layers
    assert layers[:4] == ("KDA + dense", "KDA + MoE", "KDA + MoE", "MLA + MoE")
    assert layers[-3:] == ("KDA + MoE", "MLA + MoE", "MLA + MoE")
    assert len(layers) == 93


def test_encodings_are_listed_by_size(k3_summary):
    assert list(k3_summary.encodings) == ["mxfp4", "bfloat16", "float32"]
    shares = k3_summary.encodings.values()
    assert sum(share.nbytes for share in shares) == k3_summary.nbytes
    assert sum(share.parameters for share in shares) == k3_summary.parameters
    assert k3_summary.encodings["mxfp4"] == k3_summary.parts["experts"]


def test_what_does_not_fit_is_said_with_numbers(k3_summary):
    fits, sentence = k3_summary.fits(139 << 30)
    assert not fits
    assert "take 1,453.66 GiB, 139.00 GiB are available: 1,314.66 GiB short" in sentence
    assert "as stored" in sentence
    assert "of it are routed experts" in sentence
    fits, sentence = k3_summary.fits(k3_summary.nbytes)
    assert fits
    assert sentence.endswith("0.00 GiB to spare")
    fits, sentence = k3_summary.fits(k3_summary.nbytes, torch.bfloat16)
    assert not fits
    assert "as bfloat16 take 5,17" in sentence


def test_what_stays_packed_counts_as_it_is_stored(k3_summary):
    experts = k3_summary.parts["experts"]
    needed = (k3_summary.parameters - experts.parameters) * 2 + experts.nbytes
    fits, sentence = k3_summary.fits(needed, torch.bfloat16, kept={"mxfp4"})
    assert fits
    assert "as bfloat16 and mxfp4 take" in sentence
    fits, sentence = k3_summary.fits(needed - 1, torch.bfloat16, kept={"mxfp4"})
    assert not fits
    assert f"({experts.nbytes / 2**30:,.2f} GiB of it are routed experts)" in sentence
    assert k3_summary.fits(1 << 50, torch.bfloat16, kept={"int8"})[1].count("as bfloat16 take")


def test_a_whole_checkpoint_is_complete():
    config = load_config(TINY)
    summary = summarise_checkpoint(TINY, config, expected(config))
    assert summary.complete
    assert summary.tensors == 196
    stored = read_all(TINY)
    assert summary.parameters == sum(t.numel() for t in stored.values())
    assert summary.nbytes == sum(t.nbytes for t in stored.values())
    assert set(summary.parts) < set(PARTS)
    fits, _ = summary.fits(summary.parameters * 4, torch.float32)
    assert fits
    fits, _ = summary.fits(summary.parameters * 4 - 1, torch.float32)
    assert not fits


def test_gaps_are_named_and_8_bit_weights_count_logically(tmp_path):
    config = load_config(TINY)
    tensors = read_all(TINY)
    head = "language_model.lm_head.weight"
    tensors[head], tensors[f"{head}_scale"] = quantize_int8(tensors[head], 64)
    del tensors["mm_projector.post_norm.weight"]
    tensors["optimizer.step"] = torch.zeros(1)
    tensors["language_model.model.norm.weight"] = torch.ones(7)
    a_log = "language_model.model.layers.0.self_attn.A_log"
    tensors[a_log] = tensors[a_log][:4]
    save_checkpoint(tmp_path, tensors, json_files={})
    summary = summarise_checkpoint(tmp_path, config, expected(config))
    assert not summary.complete
    assert summary.missing == ("mm_projector.post_norm.weight",)
    assert summary.left_over == ("optimizer.step",)
    assert summary.wrong_shape == ("language_model.model.norm.weight is [7], expected [1024]",)
    assert summary.parts["head"].parameters == 512 * 1024
    assert summary.parts["head"].tensors == 2
    assert summary.encodings["int8"] == PartSummary(2, 512 * 1024, 512 * 1024 + 512 * 16 * 2)
    assert summary.parts["other"].tensors == 1


def test_a_log_of_fewer_values_than_heads_is_wrong(tmp_path):
    config = load_config(TINY)
    linear = dataclasses.replace(config.text.linear_attn_config, num_heads=33)
    config = dataclasses.replace(
        config, text=dataclasses.replace(config.text, linear_attn_config=linear)
    )
    summary = summarise_checkpoint(TINY, config, expected(config))
    assert any("A_log is [32], expected [33]" in line for line in summary.wrong_shape)


def test_missing_directory_and_damaged_weights(tmp_path):
    config = load_config(TINY)
    with pytest.raises(WeightError, match="no such directory"):
        summarise_checkpoint(tmp_path / "absent", config, {})
    (tmp_path / SINGLE_NAME).write_bytes(b"\0" * 64)
    with pytest.raises(WeightError, match="damaged"):
        summarise_checkpoint(tmp_path, config, expected(config))
