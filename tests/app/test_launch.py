"""The options of ``k3vl serve``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from k3vl.app.cli import cli
from k3vl.app.launch import ServeOptions, fetch_policy, read_keys
from k3vl.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def options(*arguments: object) -> ServeOptions:
    """What the command line makes of some arguments."""
    context = cli.commands["serve"].make_context("serve", list(map(str, arguments)))
    return ServeOptions(
        **{name: context.params[name] for name in ServeOptions.__dataclass_fields__}
    )


def test_it_listens_to_this_machine_only_by_default() -> None:
    assert options().host == "127.0.0.1"
    policy = fetch_policy(options())
    assert policy.allow_private_networks is False
    assert policy.schemes == {"data", "http", "https"}


def test_files_need_a_root(tmp_path: Path) -> None:
    policy = fetch_policy(options("--allowed-media-path", tmp_path))
    assert "file" in policy.schemes
    assert policy.file_root == tmp_path
    with pytest.raises(ConfigError, match="not a directory"):
        fetch_policy(options("--allowed-media-path", tmp_path / "missing"))


def test_keys_come_from_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first-long-key\nsecond-long-key\n\n")
    keys = read_keys(options("--api-key", "third-long-key", "--api-key-file", file))
    assert set(keys) == {"first-long-key", "second-long-key", "third-long-key"}


@pytest.mark.parametrize("text", ["", "short", "schlüssel-mit-umlaut"])
def test_keys_that_protect_nothing_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError):
        read_keys(options("--api-key-file", file))


def test_a_wrong_option_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["serve", "--api-key-file", str(tmp_path / "missing")])
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert len(result.output.splitlines()) == 1


def test_the_environment_holds_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3VL_API_KEYS", "first-long-key second-long-key")
    assert read_keys(options()) == ("first-long-key", "second-long-key")
