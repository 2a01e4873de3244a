"""Media: from a locator to patches (no torch), and from patches to features (torch).

Names are loaded on first use, so code that only prepares media never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3vl.vision.encoder import VisionEncoder
    from k3vl.vision.limits import MediaLimits
    from k3vl.vision.processor import MediaProcessor
    from k3vl.vision.source import FetchPolicy

__all__ = ["FetchPolicy", "MediaLimits", "MediaProcessor", "VisionEncoder"]

_HOME = {
    "FetchPolicy": "k3vl.vision.source",
    "MediaLimits": "k3vl.vision.limits",
    "MediaProcessor": "k3vl.vision.processor",
    "VisionEncoder": "k3vl.vision.encoder",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'k3vl.vision' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """Public names, loaded or not."""
    return sorted([*globals(), *__all__])
