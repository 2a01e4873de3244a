"""What is not installed is named, with what brings it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from k3vl.app.extras import needs_extra
from k3vl.errors import ConfigError

COMMANDS = {
    ("caption", ".", "--base-url", "http://127.0.0.1:9/v1"): "--base-url needs httpx2",
    ("caption", ".", "--json-schema", "README.md"): "--json-schema needs jsonschema_rs",
    ("caption", "t.parquet", "--dry-run"): "Parquet needs pyarrow",
    ("caption", "s3://b/a.png", "--dry-run"): "a URL of this kind needs fsspec",
    ("eval", "--base-url", "http://127.0.0.1:9/v1"): "--base-url needs httpx2",
    ("demo", "--base-url", "http://127.0.0.1:9/v1"): "the demo needs gradio",
    ("serve",): "the server needs ",
}
WITHOUT = """
import sys
for name in ("gradio", "fsspec", "httpx2", "jsonschema_rs", "pyarrow", "starlette"):
    sys.modules[name] = None
from click.testing import CliRunner
from k3vl.app.cli import cli
for command in {commands}:
    result = CliRunner().invoke(cli, list(command))
    print(result.exit_code, *result.output.splitlines())
"""


def test_every_command_without_its_extra_is_one_line() -> None:
    code = WITHOUT.format(commands=list(COMMANDS))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    for line, words in zip(done.stdout.splitlines(), COMMANDS.values(), strict=True):
        assert line.startswith("1 "), line
        assert words in line
        assert ": pip install 'k3vl[" in line


def test_what_an_extra_itself_lacks_is_named() -> None:
    with (
        pytest.raises(ConfigError, match=r"^this needs inside: pip install 'k3vl\[caption\]'"),
        needs_extra("caption", "this"),
    ):
        raise ModuleNotFoundError("x", name="inside.part")


@pytest.mark.parametrize("name", [None, "k3vl.app.server"])
def test_our_own_defects_are_no_missing_extra(name: str | None) -> None:
    with pytest.raises(ImportError), needs_extra("caption", "this"):
        raise ImportError("x", name=name)
