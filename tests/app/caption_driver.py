"""``k3vl caption`` with the fake model, as a process that can be killed.

``ECHO_SECONDS`` is how long it takes for an answer.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from k3vl.app import caption as caption_module
from k3vl.app.cli import main
from tests.app.captioning_kit import EchoBackend, echo_pipeline


def load(name: str, **settings: Any) -> Any:
    return echo_pipeline(EchoBackend(seconds=float(os.environ.get("ECHO_SECONDS", "0.03"))))


if __name__ == "__main__":
    caption_module.Pipeline.load = load
    sys.argv[0] = "k3vl"
    main()
