"""Lets modules import torchvision where it is not installed; nothing in it works.

SGLang and transformers name parts of torchvision at import time for models that are not K3. The
real package would bring a CUDA build of torch. Every submodule exists, and every name in one is an
empty class.
"""

import enum
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

__version__ = "0.0.0"


class InterpolationMode(enum.Enum):
    """The one name whose members are read at import time."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


class _Submodules(MetaPathFinder, Loader):
    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith(__name__ + "."):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module) -> None:
        module.__getattr__ = __getattr__
        module.InterpolationMode = InterpolationMode


sys.meta_path.insert(0, _Submodules())
