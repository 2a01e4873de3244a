"""The entry point ``sglang.srt.plugins``: called by SGLang once in each of its processes.

SGLang logs a plugin that fails and goes on without it, so whoever starts SGLang must look whether
this one works (``k3vl serve --engine sglang`` does). What a process needs beyond this is installed
by the processor that SGLang makes in it (``processors``), because only the processes that read
requests make one, and because some of them call no entry points.
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import version
from typing import Final

from k3vl import __version__
from k3vl.errors import ConfigError
from k3vl.sglang.releases import check_version

PROCESSORS_VARIABLE: Final = "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE"
PACKAGES: Final = {
    PROCESSORS_VARIABLE: "k3vl.sglang.processors",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "k3vl.sglang.models",
}
"""SGLang's variables, and our packages that they name; its processes inherit them."""

log = logging.getLogger(__name__)


def register() -> None:
    """Put our processor and model in the place of SGLang's for Kimi K3; others do not notice.

    Raises:
        ConfigError: a release that is not supported, or another package's processors or models are
            asked for.
    """
    check_version(version("sglang"))
    for variable, package in PACKAGES.items():
        asked = os.environ.get(variable) or package
        if asked != package:
            raise ConfigError(f"{variable} names {asked}; SGLang takes one such package")
    os.environ.update(PACKAGES)
    log.info("k3vl %s: images and video for Kimi K3", __version__)
