"""What the plugin is told, there and back; no SGLang is needed."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from k3vl.errors import ConfigError
from k3vl.sglang.checkpoint import checkpoint_directory
from k3vl.sglang.plugin import PACKAGES, register
from k3vl.sglang.releases import SUPPORTED, check_version
from k3vl.sglang.settings import PluginSettings
from k3vl.vision.limits import MediaLimits

if TYPE_CHECKING:
    from pathlib import Path


def test_settings_survive_the_command_line() -> None:
    settings = PluginSettings(
        parity=True,
        limits=MediaLimits(max_video_frames=7),
        max_media_bytes=5,
        media_root="/srv/media",
        allow_private_networks=True,
        media_workers=3,
        media_seconds=1.5,
        media_memory=2**29,
    )
    config = json.loads(settings.process_config())
    assert PluginSettings.from_process_config({"image": {}, **config}) == settings


def test_nothing_said_is_the_default() -> None:
    assert PluginSettings.from_process_config({}) == PluginSettings()


@pytest.mark.parametrize(("cores", "number"), [(1, 2), (4, 2), (9, 4), (128, 8)])
def test_decoding_processes_follow_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, number: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert PluginSettings().media_workers == number
    assert PluginSettings.from_process_config({}).media_workers == number


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "must be an object"),
        ({"partiy": True}, "'k3vl' has no field 'partiy'"),
        ({"limits": {"max_frames": 1}}, "'k3vl.limits' has no field 'max_frames'"),
        ({"media_workers": "many"}, "field 'k3vl.media_workers'"),
        ({"limits": 3}, "field 'k3vl.limits'"),
    ],
)
def test_what_is_not_understood_is_an_error(value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PluginSettings.from_process_config({"k3vl": value})


def test_fetches_stay_where_the_operator_wants_them(tmp_path: Path) -> None:
    policy = PluginSettings(media_root=str(tmp_path), max_media_bytes=9).fetch_policy()
    assert policy.file_root == tmp_path
    assert "file" in policy.schemes
    assert policy.max_bytes == 9
    assert policy.max_redirects > 0
    closed = PluginSettings().fetch_policy(["example.org"])
    assert "file" not in closed.schemes
    assert closed.max_redirects == 0


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that we support, and no package of anybody's named."""
    monkeypatch.setattr("k3vl.sglang.plugin.version", lambda _: SUPPORTED[0])
    for variable in PACKAGES:
        monkeypatch.setenv(variable, "")


@pytest.mark.usefixtures("_installed")
def test_the_plugin_names_its_packages() -> None:
    register()
    register()  # SGLang may call it again
    assert {variable: os.environ[variable] for variable in PACKAGES} == PACKAGES


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("variable", PACKAGES)
def test_the_plugin_does_not_replace_another(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "theirs")
    with pytest.raises(ConfigError, match=f"{variable} names theirs"):
        register()
    assert {os.environ[name] for name in PACKAGES} == {"", "theirs"}  # nothing is half ours


@pytest.mark.parametrize("found", ["0.5.22", "0.5.18", "0.6.0", "0.5.23.post1"])
def test_releases_that_were_not_tested_are_refused(found: str) -> None:
    with pytest.raises(ConfigError, match=f"SGLang {found} is installed"):
        check_version(found)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the Hugging Face hub with one model in it, and no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "models--org--k3" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--org--k3" / "refs").mkdir()
    (tmp_path / "models--org--k3" / "refs" / "main").write_text("0123")
    return snapshot


def test_a_model_has_a_directory(hub: Path, tmp_path: Path) -> None:
    assert checkpoint_directory(str(tmp_path), None) == tmp_path
    assert checkpoint_directory("org/k3", None) == hub


def test_a_model_that_is_nowhere_is_an_error(hub: Path) -> None:
    with pytest.raises(ConfigError, match="neither a directory nor a model that is here"):
        checkpoint_directory("org/other", None)
    with pytest.raises(ConfigError, match="neither a directory"):
        checkpoint_directory("/not/there", None)
