"""Reading config.json and preprocessor_config.json."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from k3vl.config import (
    K3_MEDIA,
    checkpoint_path,
    load_config,
    load_media_config,
    parse_config,
)
from k3vl.errors import ConfigError

GOLDEN = Path(__file__).parent / "golden"
K3 = json.loads((GOLDEN / "k3_config.json").read_text())


def changed(path: str, value: object) -> dict:
    """K3's configuration with one field changed, or removed by Ellipsis."""
    data = copy.deepcopy(K3)
    *outer, last = path.split(".")
    target = data
    for key in outer:
        target = target[key]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return data


def test_k3() -> None:
    config = parse_config(K3)
    text = config.text
    assert (text.num_hidden_layers, text.hidden_size, text.num_experts) == (93, 7168, 896)
    mla = [layer for layer in range(93) if not text.is_kda(layer)]
    assert mla == [*range(3, 92, 4), 92], "the lists are 1-based, and the last two are MLA"
    assert [layer for layer in range(93) if not text.is_moe(layer)] == [0]
    assert text.expert_hidden_size == 3584
    assert text.shared_intermediate_size == 6144
    assert config.vision.head_dim == 128, "not hidden size over heads"
    assert config.eos_token_id == 163586
    assert config.media_placeholder_token_id == 163605
    assert config.quantized_format == "mxfp4-pack-quantized"


def test_the_demo_and_a_tiny_model_are_of_the_same_kind() -> None:
    for directory in (checkpoint_path("demo"), GOLDEN / "sglang_tiny"):
        assert load_config(directory).text.attn_res_block_size


def test_kimi_linear_is_of_the_family() -> None:
    data = changed("text_config.attn_res_block_size", ...)
    for name in ("routed_expert_hidden_size", "latent_moe_use_norm", "q_lora_rank"):
        del data["text_config"][name]
    data["text_config"]["hidden_act"] = "silu"
    for name in ("gate_lower_bound", "use_full_rank_gate"):
        del data["text_config"]["linear_attn_config"][name]
    text = parse_config(data).text
    assert text.attn_res_block_size is None
    assert text.expert_hidden_size == text.hidden_size
    assert text.linear_attn_config.gate_lower_bound is None


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model_type", "llava", "model_type is \"llava\", expected 'kimi_k3'"),
        ("text_config", ..., "field 'text_config' is missing"),
        ("text_config.model_type", "qwen3", 'text_config.model_type is "qwen3"'),
        ("text_config.hidden_size", ..., "text_config: field 'hidden_size' is missing"),
        ("text_config.hidden_size", "wide", "field 'hidden_size' is not valid"),
        ("text_config.kv_lora_rank", 512.5, "field 'kv_lora_rank' is not valid"),
        ("text_config.linear_attn_config.num_heads", ..., "'linear_attn_config.num_heads' is miss"),
        ("text_config.linear_attn_config.kda_layers", [1, 2], "lists 26 layers"),
        ("text_config.num_hidden_layers", 94, "num_hidden_layers is 94"),
        ("text_config.mla_use_nope", False, "mla_use_nope is false, only true is known"),
        ("text_config.rope_scaling", {"type": "yarn"}, "rope_scaling is"),
        ("text_config.hidden_act", "gelu", 'hidden_act is "gelu"'),
        ("text_config.num_experts_per_token", 0, "num_experts_per_token is 0"),
        ("text_config.num_experts_per_token", 900, "num_experts_per_token is 900"),
        ("text_config.linear_attn_config.gate_lower_bound", 5.0, "must be negative"),
        ("text_config.routed_expert_hidden_size", ..., "latent_moe_use_norm without"),
        ("vision_config.text_hidden_size", 4096, "text_hidden_size is 4096, text_config.hidden"),
        ("vision_config.merge_type", "mlp", 'merge_type is "mlp", only "sd2_tpool"'),
        ("vision_config.qkv_hidden_size", 1537, "1537 over 12 heads"),
        ("media_placeholder_token_id", ..., "'media_placeholder_token_id' is missing"),
    ],
)
def test_errors_name_the_field_and_the_values(path: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(changed(path, value))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_directories_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        load_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no config\.json; is this a checkpoint directory"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{\n oops")
    with pytest.raises(ConfigError, match=r"config.json: not JSON \(line 2\)"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds a JSON list"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


def write_media(directory: Path, media: object) -> Path:
    (directory / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": media}))
    return directory


def test_media_settings_of_k3(tmp_path: Path) -> None:
    published = {
        "in_patch_limit": 65536,
        "patch_size": 14,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_kernel_size": 2,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": 512,
        "in_patch_limit_each_frame": 16384,
        "sample_fps": 8.0,
        "temporal_merge_kernel_size": 4,
        "transparent_bg_config": {
            "pattern": "chessboard",
            "chessboard_square_size": 8,
            "chessboard_square_on_top_left": True,
            "chessboard_white_value": 255,
            "chessboard_gray_value": 180,
        },
        "transparent_bg_fill_stage": "after_resize",
        "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
    }
    assert load_media_config(write_media(tmp_path, published)) == K3_MEDIA


def test_absent_background_drops_alpha_and_absent_keys_take_the_code_defaults(tmp_path) -> None:
    least = {
        "patch_size": 14,
        "merge_kernel_size": 2,
        "in_patch_limit": 100,
        "patch_limit_on_one_side": 512,
    }
    config = load_media_config(write_media(tmp_path, least))
    assert config.transparent_bg_config is None
    assert config.transparent_bg_fill_stage == "before_resize"
    config = load_media_config(write_media(tmp_path, {**least, "transparent_bg_config": {}}))
    assert config.transparent_bg_config is not None
    assert config.transparent_bg_config.pattern == "black"
    assert config.transparent_bg_config.chessboard_square_size == 16


def test_media_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="field 'media_proc_cfg' is missing"):
        load_media_config(write_media(tmp_path, None))
    with pytest.raises(ConfigError, match="field 'patch_size' is missing"):
        load_media_config(write_media(tmp_path, {}))
    least = {"patch_size": 0, "merge_kernel_size": 2, "in_patch_limit": 1}
    with pytest.raises(ConfigError, match="patch_size is 0, must be positive"):
        load_media_config(write_media(tmp_path, {**least, "patch_limit_on_one_side": 1}))
