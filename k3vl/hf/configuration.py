"""``config.json`` as transformers holds it; what it means is ``k3vl.config``'s business."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedConfig

from k3vl.config import parse_config
from k3vl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from k3vl.config import K3Config


_DOWNLOADS = frozenset(
    {
        *("cache_dir", "code_revision", "force_download", "local_files_only", "proxies"),
        *("revision", "subfolder", "token", "trust_remote_code", "use_safetensors"),
        *("adapter_kwargs", "low_cpu_mem_usage", "weights_only"),
        *("_commit_hash", "_from_auto", "_from_pipeline"),
    }
)


def refuse(where: str, options: Mapping[str, Any]) -> None:
    """Refuse options that have a meaning in transformers and none here.

    Those that only concern downloads, or how a file is read, are let pass.

    Raises:
        ConfigError: names them.
    """
    given = {name for name, value in options.items() if value is not None and value is not False}
    if unknown := sorted(given - _DOWNLOADS):
        raise ConfigError(f"{where}: {', '.join(unknown)}: not supported")


class KimiK3TextConfig(PreTrainedConfig):
    """``text_config``: every field of the file is an attribute of the same name."""

    model_type = "kimi_linear"
    base_config_key = "text_config"

    rope_scaling: Any = None  # K3's files say null; the base class warns of the name


class KimiK3VisionConfig(PreTrainedConfig):
    """``vision_config``, likewise."""

    model_type = "kimi_k3_vision"
    base_config_key = "vision_config"


class KimiK3Config(PreTrainedConfig):
    """A whole checkpoint's configuration; fields have K3's own names."""

    model_type = "kimi_k3"
    sub_configs: ClassVar[dict[str, Any]] = {
        "text_config": KimiK3TextConfig,
        "vision_config": KimiK3VisionConfig,
    }

    text_config: Any = None
    vision_config: Any = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Make the two parts configurations of their own."""
        if not isinstance(self.text_config, PreTrainedConfig):
            self.text_config = KimiK3TextConfig(**self.text_config or {})
        if not isinstance(self.vision_config, PreTrainedConfig):
            self.vision_config = KimiK3VisionConfig(**self.vision_config or {})
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call] # it has no types

    def parse(self) -> K3Config:
        """Check and freeze.

        Raises:
            ConfigError: a field is missing, of the wrong type, or in contradiction to another one.
        """
        return parse_config(self.to_dict(), origin=self.name_or_path or "KimiK3Config")
