"""k3vl: a multimodal serving pipeline for Kimi K3.

Importing the package costs nothing: names are loaded on first use, so ``k3vl --help`` and
``k3vl.xtml`` never pay for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3vl.pipeline import Pipeline, Reply
    from k3vl.types import MediaPart, Message, SamplingParams, TextPart

__version__ = "0.1.0"
__all__ = ["MediaPart", "Message", "Pipeline", "Reply", "SamplingParams", "TextPart"]

_HOME = {
    "Pipeline": "k3vl.pipeline",
    "Reply": "k3vl.pipeline",
    "MediaPart": "k3vl.types",
    "Message": "k3vl.types",
    "SamplingParams": "k3vl.types",
    "TextPart": "k3vl.types",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'k3vl' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """Public names, loaded or not."""
    return sorted([*globals(), *__all__])
