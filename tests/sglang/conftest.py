"""Tests against a real SGLang, for the environment that ``make test-sglang`` builds.

Without SGLang there is nothing to collect here; the tests of what needs no SGLang lie elsewhere.
The variables must be set before anything imports ``sglang`` or ``triton``.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from tests.sglang import kit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from k3vl.pipeline import Pipeline

if find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.update(kit.ENVIRONMENT)
    sys.path.insert(0, kit.ENVIRONMENT["PYTHONPATH"])


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.sglang.taught import teach_the_call

    directory = kit.make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")
    teach_the_call(directory)
    return directory


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[kit.Server]:
    """One for all tests: its start takes as long as many of them."""
    log = tmp_path_factory.mktemp("server") / "sglang.log"
    server = kit.Server(checkpoint, log)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def pipeline(checkpoint: Path) -> Iterator[Pipeline]:
    """Our embedded engine on the same checkpoint, in float32."""
    from k3vl.pipeline import Pipeline

    with Pipeline.load(checkpoint, device="cpu") as pipeline:
        yield pipeline
