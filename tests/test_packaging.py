"""The package is called k3vl and nothing else, and importing it is cheap."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import k3vl

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("folder", ["kernels", "app"])
def test_folders_are_reached_through_links_only(folder: str) -> None:
    """PyPI's ``kernels`` must never be shadowed: a bare folder without ``__init__`` loses to it."""
    assert not (ROOT / folder / "__init__.py").exists()
    link = ROOT / "k3vl" / folder
    assert link.is_symlink()
    assert link.resolve() == ROOT / folder


def test_kernels_is_not_ours() -> None:
    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.loader is None or ROOT not in Path(str(spec.origin)).parents


def test_public_names_are_the_declared_ones() -> None:
    assert sorted(k3vl.__all__) == [
        "MediaPart",
        "Message",
        "Pipeline",
        "Reply",
        "SamplingParams",
        "TextPart",
    ]
    for name in k3vl.__all__:
        assert getattr(k3vl, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = k3vl.nothing


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import k3vl", {"torch", "numpy", "PIL", "av", "pydantic"}),
        ("import k3vl.types, k3vl.errors", {"torch", "numpy", "PIL"}),
        ("import k3vl.xtml, k3vl.xtml.render, k3vl.xtml.parser", {"torch", "numpy", "PIL"}),
        ("import k3vl.config", {"torch", "numpy", "PIL"}),
        ("import k3vl.app.cli", {"torch", "numpy", "PIL", "av", "gradio", "sglang"}),
        ("import k3vl.vision.processor", {"torch"}),
    ],
)
def test_import_loads_nothing_heavy(statement: str, forbidden: set[str]) -> None:
    code = f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    assert not forbidden & set(json.loads(loaded.stdout))


def test_changelog_is_at_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first = next(line for line in changelog.splitlines() if line.startswith("## "))
    assert first.split()[1] == k3vl.__version__


def test_readme_shows_the_tree() -> None:
    """Every source folder is explained in the README's tree, and the tree names no other."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    folders = [
        path.name + "/"
        for top in ("k3vl", "kernels", "app")
        for path in sorted((ROOT / top).rglob("*"))
        if path.is_dir() and not path.is_symlink() and any(path.glob("*.py"))
    ]
    missing = [folder for folder in folders if folder not in readme]
    assert missing == []
