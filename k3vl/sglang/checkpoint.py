"""The directory behind SGLang's ``--model-path``."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from k3vl.errors import ConfigError

_SMALL_FILES = ["*.json", "tiktoken.model"]


def checkpoint_directory(model_path: str, revision: str | None) -> Path:
    """A local directory with the tokenizer and the media settings.

    Args:
        model_path: a directory, or a name on the Hugging Face hub; SGLang has downloaded the files
            of a name before it makes a processor.
        revision: of a name.

    Raises:
        ConfigError: neither.
    """
    if Path(model_path).is_dir():
        return Path(model_path)
    try:
        return Path(snapshot_download(model_path, revision=revision, allow_patterns=_SMALL_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as exc:
        raise ConfigError(f"{model_path}: neither a directory nor a model that is here") from exc
