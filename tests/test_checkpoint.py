"""Reading and writing checkpoint directories, strictly."""

import json
from pathlib import Path

import pytest
import torch

from k3vl.checkpoint import (
    INDEX_NAME,
    SINGLE_NAME,
    CheckpointReader,
    Placement,
    TensorSpec,
    logical_tensors,
)
from k3vl.checkpoint_writer import save_checkpoint
from k3vl.errors import WeightError
from k3vl.kernels.int8 import dequantize_int8, quantize_int8
from k3vl.kernels.mxfp4 import dequantize_mxfp4


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def encoded_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    codes, scale = quantize_int8(random(6, 32), 16)
    return {
        "a.plain.weight": random(4, 8).bfloat16(),
        "a.half.weight": random(5).half(),
        "a.eight.weight": codes,
        "a.eight.weight_scale": scale,
        "b.four.weight_packed": torch.randint(0, 256, (3, 32), generator=generator).byte(),
        "b.four.weight_scale": torch.randint(120, 134, (3, 2), generator=generator).byte(),
        "b.A_log": random(9),
    }


def targets(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {
        "a.plain.weight": torch.full((4, 8), 9.0, dtype=dtype),
        "a.half.weight": torch.full((5,), 9.0, dtype=dtype),
        "a.eight.weight": torch.full((6, 32), 9.0, dtype=dtype),
        "b.four.weight": torch.full((3, 64), 9.0, dtype=dtype),
        "b.A_log": torch.full((9,), 9.0, dtype=dtype),
    }


def placed(tensors: dict[str, torch.Tensor]) -> dict[str, Placement]:
    return {name: Placement(tensor) for name, tensor in tensors.items()}


def written(directory: Path, tensors: dict[str, torch.Tensor], limit: int = 1 << 30) -> Path:
    save_checkpoint(directory, tensors, json_files={}, max_shard_bytes=limit)
    return directory


@pytest.mark.parametrize("limit", [1 << 30, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_encoding_is_decoded_into_the_targets(tmp_path, limit, dtype):
    stored = encoded_tensors()
    reader = CheckpointReader(written(tmp_path, stored, limit))
    out = targets(dtype)
    reader.load_into(placed(out), prefixes=("a.", "b."))
    assert torch.equal(out["a.plain.weight"], stored["a.plain.weight"].to(dtype))
    assert torch.equal(out["a.half.weight"], stored["a.half.weight"].to(dtype))
    eight = (stored["a.eight.weight"], stored["a.eight.weight_scale"])
    assert torch.equal(out["a.eight.weight"], dequantize_int8(*eight, dtype=dtype))
    four = (stored["b.four.weight_packed"], stored["b.four.weight_scale"])
    assert torch.equal(out["b.four.weight"], dequantize_mxfp4(*four, dtype=dtype))


def test_one_shard_needs_no_index_and_several_have_k3s_names(tmp_path):
    stored = encoded_tensors()
    written(tmp_path / "one", stored)
    assert [p.name for p in (tmp_path / "one").iterdir()] == [SINGLE_NAME]
    written(tmp_path / "many", stored, limit=200)
    names = sorted(p.name for p in (tmp_path / "many").glob("*.safetensors"))
    assert names[0] == f"model-00001-of-{len(names):06d}.safetensors"
    assert len(names) > 1
    index = json.loads((tmp_path / "many" / INDEX_NAME).read_text())
    assert index["weight_map"].keys() == stored.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
    specs = CheckpointReader(tmp_path / "many").specs()
    assert specs == {n: TensorSpec(tuple(t.shape), t.dtype) for n, t in stored.items()}


def test_targets_may_be_views_of_one_fused_parameter(tmp_path):
    stored = {"q": random(2, 4), "k": random(3, 4, seed=1)}
    fused = torch.nn.Parameter(torch.zeros(5, 4))
    reader = CheckpointReader(written(tmp_path, stored))
    reader.load_into(placed({"q": fused[:2], "k": fused[2:]}), prefixes=("q", "k"))
    assert torch.equal(fused.detach(), torch.cat([stored["q"], stored["k"]]))


@pytest.mark.parametrize("stored", [random(12), random(1, 1, 4, 1)])
def test_leading_values_ignore_a_poisoned_tail(tmp_path, stored):
    expected = stored.flatten()[:4].clone()
    stored.view(-1)[4:] = float("nan")
    target = torch.zeros(4)
    reader = CheckpointReader(written(tmp_path, {"A_log": stored}))
    reader.load_into({"A_log": Placement(target, leading=True)}, prefixes=("A_log",))
    assert torch.equal(target, expected)


def test_leading_values_must_be_there(tmp_path):
    reader = CheckpointReader(written(tmp_path, {"A_log": random(3)}))
    with pytest.raises(WeightError, match=r"A_log has 3 values .*at least 4"):
        reader.load_into({"A_log": Placement(torch.zeros(4), leading=True)}, prefixes=("A",))


def test_large_quantized_tensors_are_decoded_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("k3vl.checkpoint._DECODE_VALUES", 70)
    codes, scale = quantize_int8(random(7, 32), 8)
    reader = CheckpointReader(written(tmp_path, {"w.weight": codes, "w.weight_scale": scale}))
    target = torch.zeros(7, 32)
    reader.load_into({"w.weight": Placement(target)}, prefixes=("w.",))
    assert torch.equal(target, dequantize_int8(codes, scale, dtype=torch.float32))


# ---------------------------------------------------------------------- strictness


def test_missing_and_left_over_names_are_counted_and_named(tmp_path):
    reader = CheckpointReader(written(tmp_path, encoded_tensors()))
    out = targets()
    del out["a.plain.weight"]
    out |= {f"a.absent{i}": torch.zeros(1) for i in range(7)}
    with pytest.raises(WeightError) as caught:
        reader.load_into(placed(out), prefixes=("a.", "b."))
    message = str(caught.value)
    assert (
        "7 tensors (a.absent0, a.absent1, a.absent2, a.absent3, a.absent4 and 2 more) missing"
        in (message)
    )
    assert "1 tensor (a.plain.weight) left over" in message
    assert (out["a.eight.weight"] == 9).all(), "nothing may be written when names disagree"


def test_each_loader_takes_its_own_prefix_and_the_union_is_checked(tmp_path):
    reader = CheckpointReader(written(tmp_path, encoded_tensors()))
    out = targets()
    mine = {name: tensor for name, tensor in out.items() if name.startswith("b.")}
    reader.load_into(placed(mine), prefixes=("b.",))
    assert (out["a.plain.weight"] == 9).all()
    reader.require_only(("a.", "b."))
    with pytest.raises(WeightError, match=r"4 tensors \(a\..* left over: under none of b\."):
        reader.require_only(("b.",))


def test_wrong_shapes_are_named_before_anything_is_written(tmp_path):
    reader = CheckpointReader(written(tmp_path, encoded_tensors()))
    out = targets()
    out["b.four.weight"] = torch.zeros(3, 32)
    with pytest.raises(WeightError, match=r"b.four.weight is \[3, 64\], the model needs \[3, 32\]"):
        reader.load_into(placed(out), prefixes=("a.", "b."))
    assert (out["a.plain.weight"] == 9).all()


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"x.weight_packed": ((2, 16), torch.uint8)}, "has no x.weight_scale"),
        ({"x.weight": ((2, 16), torch.int8)}, "has no x.weight_scale"),
        (
            {"x.weight_packed": ((2, 16), torch.uint8), "x.weight_scale": ((2, 2), torch.uint8)},
            "one uint8 scale for 32 columns",
        ),
        (
            {"x.weight_packed": ((2, 16), torch.uint8), "x.weight_scale": ((2, 1), torch.float16)},
            "one uint8 scale for 32 columns",
        ),
        (
            {"x.weight_packed": ((2, 16), torch.int32), "x.weight_scale": ((2, 1), torch.uint8)},
            "int32, an encoding that is not known",
        ),
        (
            {"x.weight": ((2, 16), torch.int8), "x.weight_scale": ((2, 3), torch.float16)},
            "equally wide groups",
        ),
        (
            {"x.weight": ((2, 16), torch.int8), "x.weight_scale": ((2, 2), torch.uint8)},
            "floating scale",
        ),
        ({"x.weight": ((2, 16), torch.float8_e4m3fn)}, "float8_e4m3fn, an encoding"),
        (
            {"x.weight": ((2, 32), torch.float32), "x.weight_packed": ((2, 16), torch.uint8)},
            "stored twice",
        ),
    ],
)
def test_encodings_that_do_not_fit_are_named(specs, message):
    with pytest.raises(WeightError, match=message):
        logical_tensors({name: TensorSpec(*spec) for name, spec in specs.items()})


def test_a_scale_without_values_is_a_tensor_of_its_own():
    specs = {"norm.weight_scale": TensorSpec((4,), torch.float32)}
    assert logical_tensors(specs).keys() == specs.keys()


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        (torch.zeros(1, 16, dtype=torch.uint8), torch.tensor([[255]], dtype=torch.uint8)),
        (torch.zeros(1, 16, dtype=torch.int8), torch.tensor([[float("nan")]]).half()),
    ],
)
def test_scales_that_are_not_numbers_are_refused(tmp_path, values, scale):
    four = values.dtype == torch.uint8
    name = "x.weight_packed" if four else "x.weight"
    reader = CheckpointReader(written(tmp_path, {name: values, "x.weight_scale": scale}))
    target = torch.zeros(1, 32 if four else 16)
    with pytest.raises(WeightError, match=r"x.weight_scale: 1 of 1 scales are not numbers"):
        reader.load_into({"x.weight": Placement(target)}, prefixes=("x.",))


# ---------------------------------------------------------------------- damage


def test_missing_directory_and_missing_weights(tmp_path):
    with pytest.raises(WeightError, match="no such directory"):
        CheckpointReader(tmp_path / "absent")
    with pytest.raises(WeightError, match="no weights"):
        CheckpointReader(tmp_path)


def test_directory_that_cannot_be_looked_into(tmp_path):
    with pytest.raises(WeightError, match=r"cannot be read \(OSError\)"):
        CheckpointReader(tmp_path / ("x" * 300))


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_truncated_file_is_named(tmp_path, keep):
    written(tmp_path, encoded_tensors())
    path = tmp_path / SINGLE_NAME
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightError, match=r"model.safetensors: (damaged|cannot be read)"):
        CheckpointReader(tmp_path)


def test_damaged_shard_is_found_when_its_part_is_loaded(tmp_path):
    written(tmp_path, {"a": random(4), "b": random(4)}, limit=16)
    (tmp_path / "model-00002-of-000002.safetensors").write_text("not tensors at all")
    reader = CheckpointReader(tmp_path)
    reader.load_into({"a": Placement(torch.zeros(4))}, prefixes=("a",))
    with pytest.raises(WeightError, match=r"model-00002-of-000002.safetensors: damaged"):
        reader.load_into({"b": Placement(torch.zeros(4))}, prefixes=("b",))


def test_missing_shard_is_named(tmp_path):
    written(tmp_path, {"a": random(4), "b": random(4)}, limit=16)
    (tmp_path / "model-00002-of-000002.safetensors").unlink()
    with pytest.raises(WeightError, match=r"model-00002-of-000002.safetensors: no such file"):
        CheckpointReader(tmp_path).specs()


def test_index_and_shard_must_agree(tmp_path):
    written(tmp_path, {"a": random(4), "b": random(4)}, limit=16)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    index["weight_map"]["c"] = index["weight_map"]["a"]
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(WeightError, match=r"1 tensor \(c\) missing, though the index names it"):
        CheckpointReader(tmp_path).specs()
    del index["weight_map"]["c"]
    index["weight_map"]["a"] = index["weight_map"]["b"]
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(WeightError, match="missing, though the index"):
        CheckpointReader(tmp_path).specs()


def test_tensors_that_the_index_hides_are_named(tmp_path):
    written(tmp_path, {"a": random(4), "b": random(4), "c": random(4)}, limit=32)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    del index["weight_map"]["b"]
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(WeightError, match=r"1 tensor \(b\) left over, by the index"):
        CheckpointReader(tmp_path).specs()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "weight_map"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": {"a": 3}}', "file of a is not a plain file name"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "file of a is not a plain file name"),
    ],
)
def test_index_that_cannot_be_understood(tmp_path, text, message):
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(WeightError, match=message):
        CheckpointReader(tmp_path)


# ---------------------------------------------------------------------- writing


def test_configuration_is_written_beside_the_weights(tmp_path):
    content = {"model_type": "kimi_k3", "name": "中"}
    save_checkpoint(tmp_path, {"a": random(2)}, json_files={"config.json": content})
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8")) == content


def test_views_of_one_storage_can_be_written(tmp_path):
    base = random(4, 4)
    written(tmp_path, {"a": base[:2], "b": base.T})
    target = torch.zeros(4, 4)
    reader = CheckpointReader(tmp_path)
    reader.load_into({"b": Placement(target)}, prefixes=("b",))
    assert torch.equal(target, base.T)


def test_weights_are_never_mixed_with_older_ones(tmp_path):
    written(tmp_path, {"a": random(2)})
    with pytest.raises(WeightError, match="holds weights already"):
        written(tmp_path, {"a": random(2)})


def test_unwritable_place_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightError, match="cannot be written"):
        written(tmp_path / "file", {"a": random(2)})
