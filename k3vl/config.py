"""What a checkpoint says about itself, as frozen values.

``config.json`` and ``preprocessor_config.json`` of a Hugging Face checkpoint directory, in K3's own
field names. The same classes describe the 2.8 T model, the demo checkpoint and tiny test models.
``Kimi-Linear`` (no attention residuals, no latent experts, SiLU, low-rank output gate) is read as
the member of the family that it is.

Source: moonshotai/Kimi-K3 ``config.json`` (revision 9f62e4e9), ``preprocessor_config.json``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from k3vl.errors import ConfigError

# A checkpoint's files carry many fields without a meaning for inference; only the declared ones are
# read. A float where an int belongs ("12.0") is an error, a missing field too.
_PYDANTIC = ConfigDict(extra="ignore", strict=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionConfig:
    """``linear_attn_config``: which layers are KDA, and their geometry.

    Layer numbers are 1-based.
    """

    __pydantic_config__ = _PYDANTIC

    full_attn_layers: tuple[int, ...]
    kda_layers: tuple[int, ...]
    num_heads: int
    head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float | None = None
    use_full_rank_gate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """``text_config``: the hybrid language model.

    Optional fields are the ones that ``Kimi-Linear`` lacks: no ``attn_res_block_size`` means a
    plain residual stream, no ``routed_expert_hidden_size`` means experts as wide as the model.
    """

    __pydantic_config__ = _PYDANTIC

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    linear_attn_config: LinearAttentionConfig
    num_experts: int
    moe_intermediate_size: int
    num_shared_experts: int
    rms_norm_eps: float
    q_lora_rank: int | None = None
    mla_use_nope: bool = False
    mla_use_output_gate: bool = False
    num_experts_per_token: int = 0
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    moe_renormalize: bool = True
    moe_router_activation_func: str = "sigmoid"
    routed_scaling_factor: float = 1.0
    num_expert_group: int = 1
    topk_group: int = 1
    hidden_act: str = "silu"
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0
    routed_expert_hidden_size: int | None = None
    latent_moe_use_norm: bool = False
    attn_res_block_size: int | None = None
    max_position_embeddings: int = 1_048_576
    tie_word_embeddings: bool = False
    num_nextn_predict_layers: int = 0
    rope_scaling: dict[str, Any] | None = None

    def is_kda(self, layer: int) -> bool:
        """Whether 0-based ``layer`` is Kimi Delta Attention (else gated MLA)."""
        return layer + 1 in self.linear_attn_config.kda_layers

    def is_moe(self, layer: int) -> bool:
        """Whether 0-based ``layer`` has routed experts (else one dense MLP)."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @property
    def expert_hidden_size(self) -> int:
        """Width the routed experts work on: the latent, or the model's own."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def shared_intermediate_size(self) -> int:
        """Inner width of the shared experts, which are fused into one MLP."""
        return self.num_shared_experts * self.moe_intermediate_size


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """``vision_config``: MoonViT3d tower and patch merger."""

    __pydantic_config__ = _PYDANTIC

    patch_size: int
    init_pos_emb_height: int
    init_pos_emb_width: int
    init_pos_emb_time: int
    vt_hidden_size: int
    vt_intermediate_size: int
    vt_num_hidden_layers: int
    vt_num_attention_heads: int
    qkv_hidden_size: int
    merge_kernel_size: tuple[int, int]
    text_hidden_size: int
    mm_hidden_size: int
    projector_ln_eps: float = 1e-5
    merge_type: str = "sd2_tpool"
    mm_projector_type: str = "patchmergerv2"
    norm_type: str = "rmsnorm"
    pos_emb_type: str = "divided_fixed"
    pos_emb_interpolation_mode: str = "bilinear"

    @property
    def head_dim(self) -> int:
        """Width of one attention head; not ``vt_hidden_size / heads`` in K3."""
        return self.qkv_hidden_size // self.vt_num_attention_heads

    @property
    def merged_size(self) -> int:
        """Width of a merged 2x2 cell before the projector."""
        return self.vt_hidden_size * self.merge_kernel_size[0] * self.merge_kernel_size[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class K3Config:
    """A whole checkpoint's ``config.json``.

    Attributes:
        text, vision: the two models.
        media_placeholder_token_id: ``<|media_pad|>``; its rows are replaced by features.
        eos_token_id: ends a turn (``<|end_of_msg|>``).
        quantized_format: ``quantization_config.format``, wherever it lies; None for plain weights.
    """

    text: TextConfig
    vision: VisionConfig
    media_placeholder_token_id: int
    eos_token_id: int
    quantized_format: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransparentBackground:
    """``transparent_bg_config``: what lies under transparent pixels. Grey levels are 0-255."""

    __pydantic_config__ = _PYDANTIC

    pattern: Literal["black", "white", "chessboard"] = "black"
    chessboard_square_size: int = 16
    chessboard_square_on_top_left: bool = True
    chessboard_white_value: int = 255
    chessboard_gray_value: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """``media_proc_cfg`` of ``preprocessor_config.json``; defaults are the released code's own.

    Attributes:
        in_patch_limit: patches of one picture before padding.
        patch_limit_on_one_side: patches along one side.
        fixed_output_tokens: same token count for every picture; None computes it.
        in_patch_limit_each_frame: patches of one video frame; None: as for a picture.
        in_patch_limit_video: patches of all frames of a clip together; None: no such limit.
        sample_fps: video frames a second that are looked at.
        temporal_merge_kernel_size: frames that are pooled into one group.
        transparent_bg_config: None drops alpha.
        transparent_bg_fill_stage: composite before or after the resize.
    """

    __pydantic_config__ = _PYDANTIC

    patch_size: int
    merge_kernel_size: int
    in_patch_limit: int
    patch_limit_on_one_side: int
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    fixed_output_tokens: int | None = None
    in_patch_limit_each_frame: int | None = None
    in_patch_limit_video: int | None = None
    sample_fps: float = 2.0
    temporal_merge_kernel_size: int = 4
    timestamp_mode: Literal["hh:mm:ss.fff", "mm:ss.fff", "mm:ss"] = "hh:mm:ss.fff"
    transparent_bg_config: TransparentBackground | None = None
    transparent_bg_fill_stage: Literal["before_resize", "after_resize"] = "before_resize"


K3_MEDIA = MediaConfig(
    patch_size=14,
    merge_kernel_size=2,
    in_patch_limit=65536,
    patch_limit_on_one_side=512,
    in_patch_limit_each_frame=16384,
    sample_fps=8.0,
    transparent_bg_config=TransparentBackground(
        pattern="chessboard", chessboard_square_size=8, chessboard_gray_value=180
    ),
    transparent_bg_fill_stage="after_resize",
)
"""Kimi K3's published media settings."""

K25_MEDIA = MediaConfig(
    patch_size=14,
    merge_kernel_size=2,
    in_patch_limit=16384,
    patch_limit_on_one_side=512,
    in_patch_limit_each_frame=4096,
    sample_fps=2.0,
)
"""Kimi K2.5's published media settings."""


# ---------------------------------------------------------------------- reading

_T = TypeVar("_T")

DEMO_CHECKPOINT = Path(__file__).parent / "demo" / "checkpoint"


def checkpoint_path(name: str | Path) -> Path:
    """The directory behind a model's name: ``demo`` comes with the package, others are paths."""
    return DEMO_CHECKPOINT if str(name) == "demo" else Path(name)


def load_config(directory: Path) -> K3Config:
    """Read ``config.json`` of a checkpoint directory.

    Raises:
        ConfigError: no such directory or file, not JSON, another architecture, a field missing, of
            the wrong type, or in contradiction to another one.
    """
    return parse_config(_read_json(directory, "config.json"), origin=str(directory / "config.json"))


def load_media_config(directory: Path) -> MediaConfig:
    """Read ``preprocessor_config.json`` of a checkpoint directory.

    Raises:
        ConfigError: as :func:`load_config`.
    """
    name = "preprocessor_config.json"
    data = _read_json(directory, name)
    media = data.get("media_proc_cfg")
    if not isinstance(media, dict):
        raise ConfigError(f"{directory / name}: field 'media_proc_cfg' is missing")
    config = _validate(MediaConfig, media, f"{directory / name}: media_proc_cfg")
    for field_name in ("patch_size", "merge_kernel_size", "in_patch_limit", "sample_fps"):
        value = getattr(config, field_name)
        if value <= 0:
            raise ConfigError(f"{directory / name}: {field_name} is {value}, must be positive")
    return config


def parse_config(data: dict[str, Any], *, origin: str = "config.json") -> K3Config:
    """Check and freeze the content of a ``config.json``.

    Raises:
        ConfigError: as :func:`load_config`; the message starts with ``origin``.
    """
    model_type = data.get("model_type")
    if model_type != "kimi_k3":
        raise ConfigError(f"{origin}: model_type is {_shown(model_type)}, expected 'kimi_k3'")
    for part in ("text_config", "vision_config"):
        if not isinstance(data.get(part), dict):
            raise ConfigError(f"{origin}: field '{part}' is missing")
    text_data, vision_data = data["text_config"], data["vision_config"]
    if (text_type := text_data.get("model_type", "kimi_linear")) != "kimi_linear":
        raise ConfigError(
            f"{origin}: text_config.model_type is {_shown(text_type)}, expected 'kimi_linear'"
        )
    for key in ("media_placeholder_token_id", "eos_token_id"):
        if not isinstance(data.get(key, text_data.get(key)), int):
            raise ConfigError(f"{origin}: field '{key}' is missing or not an integer")
    quantization = text_data.get("quantization_config") or data.get("quantization_config") or {}
    config = K3Config(
        text=_validate(TextConfig, text_data, f"{origin}: text_config"),
        vision=_validate(VisionConfig, vision_data, f"{origin}: vision_config"),
        media_placeholder_token_id=data.get(
            "media_placeholder_token_id", text_data.get("media_placeholder_token_id")
        ),
        eos_token_id=data.get("eos_token_id", text_data.get("eos_token_id")),
        quantized_format=quantization.get("format"),
    )
    _check_text(config.text, origin)
    _check_vision(config, origin)
    return config


def _check_text(text: TextConfig, origin: str) -> None:
    """Contradictions and parts of the family that nobody has implemented."""
    linear = text.linear_attn_config
    listed = sorted((*linear.full_attn_layers, *linear.kda_layers))
    if listed != list(range(1, text.num_hidden_layers + 1)):
        raise ConfigError(
            f"{origin}: linear_attn_config lists {len(listed)} layers "
            f"({len(set(listed))} different), num_hidden_layers is {text.num_hidden_layers}; "
            "every layer 1..n must be in exactly one of kda_layers and full_attn_layers"
        )
    top_k = text.num_experts_per_token
    wrong = {
        "mla_use_nope": (text.mla_use_nope, True),
        "rope_scaling": (text.rope_scaling, None),
        "moe_router_activation_func": (text.moe_router_activation_func, "sigmoid"),
        "num_expert_group": (text.num_expert_group, 1),
        "topk_group": (text.topk_group, 1),
        "num_nextn_predict_layers": (text.num_nextn_predict_layers, 0),
        "tie_word_embeddings": (text.tie_word_embeddings, False),
    }
    for name, (value, expected) in wrong.items():
        if value != expected:
            raise ConfigError(
                f"{origin}: text_config.{name} is {_shown(value)}, only {_shown(expected)} is known"
            )
    if text.hidden_act not in ("situ", "silu"):
        raise ConfigError(f"{origin}: hidden_act is {_shown(text.hidden_act)}, not situ or silu")
    if not 0 < top_k <= text.num_experts:
        raise ConfigError(
            f"{origin}: num_experts_per_token is {top_k} with num_experts {text.num_experts}"
        )
    if linear.gate_lower_bound is not None and linear.gate_lower_bound >= 0:
        raise ConfigError(
            f"{origin}: gate_lower_bound is {linear.gate_lower_bound}, must be negative"
        )
    if text.latent_moe_use_norm and text.routed_expert_hidden_size is None:
        raise ConfigError(f"{origin}: latent_moe_use_norm without routed_expert_hidden_size")


def _check_vision(config: K3Config, origin: str) -> None:
    """Contradictions between and inside the two models."""
    vision = config.vision
    if vision.text_hidden_size != config.text.hidden_size:
        raise ConfigError(
            f"{origin}: vision_config.text_hidden_size is {vision.text_hidden_size}, "
            f"text_config.hidden_size is {config.text.hidden_size}"
        )
    if vision.mm_hidden_size != vision.vt_hidden_size:
        raise ConfigError(
            f"{origin}: mm_hidden_size is {vision.mm_hidden_size}, vt_hidden_size is "
            f"{vision.vt_hidden_size}; the patch merger takes the tower's own width"
        )
    known = {
        "merge_type": "sd2_tpool",
        "mm_projector_type": "patchmergerv2",
        "norm_type": "rmsnorm",
        "pos_emb_type": "divided_fixed",
        "pos_emb_interpolation_mode": "bilinear",
        "merge_kernel_size": (2, 2),
    }
    for name, expected in known.items():
        if (value := getattr(vision, name)) != expected:
            raise ConfigError(
                f"{origin}: vision_config.{name} is {_shown(value)}, only {_shown(expected)} "
                "is known"
            )
    if vision.qkv_hidden_size % vision.vt_num_attention_heads or vision.head_dim % 4:
        raise ConfigError(
            f"{origin}: qkv_hidden_size {vision.qkv_hidden_size} over "
            f"{vision.vt_num_attention_heads} heads is not a multiple of 4 each"
        )


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    """One JSON object from a checkpoint directory, or a ConfigError that says what is wrong."""
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory")
    path = directory / name
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{directory}: no {name}; is this a checkpoint directory?") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: cannot be read ({type(exc).__name__})") from exc
    except json.JSONDecodeError as exc:
        raise ConfigError(f"{path}: not JSON (line {exc.lineno})") from exc
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds a JSON {type(data).__name__}, expected an object")
    return data


def _validate(cls: type[_T], data: dict[str, Any], origin: str) -> _T:
    """Let pydantic fill a dataclass; its first complaint becomes ours."""
    try:
        return TypeAdapter(cls).validate_python(data)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        missing = first["type"] in ("missing", "missing_argument")
        what = "is missing" if missing else f"is not valid: {first['msg']}"
        raise ConfigError(f"{origin}: field '{path}' {what}") from exc


def _shown(value: object) -> str:
    """A short, safe form of a configuration value for an error message."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
