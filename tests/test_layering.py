"""Imports may only point down, and siblings do not know each other (``ast``, nothing is run)."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = (
    ("k3vl.app", "k3vl.__main__"),
    ("k3vl.demo", "k3vl.hf", "k3vl.sglang"),
    (
        *(
            "k3vl.pipeline",
            "k3vl.bulk",
            "k3vl.load",
            "k3vl.generation",
            "k3vl.prompt",
            "k3vl.constrain",
        ),
        *("k3vl.rollouts", "k3vl.synthetic"),
        # Measuring the whole tower needs the tower, which lies above the kernels.
        *("k3vl.kernels.bench.__main__", "k3vl.kernels.bench.tower_cases"),
    ),
    ("k3vl.xtml", "k3vl.vision", "k3vl.lm"),
    (
        *("k3vl.checkpoint", "k3vl.checkpoint_summary", "k3vl.checkpoint_writer"),
        "k3vl.parameters",
    ),
    ("k3vl.kernels",),
    ("k3vl.types", "k3vl.config"),
    ("k3vl.errors",),
)
"""From top to bottom."""
SIBLINGS = ("k3vl.xtml", "k3vl.vision", "k3vl.lm", "k3vl.demo", "k3vl.hf", "k3vl.sglang")
SOURCES = {"k3vl": "k3vl", "kernels": "k3vl.kernels", "app": "k3vl.app"}
"""Real folders -> package names; the links inside k3vl are skipped."""


def modules() -> list[tuple[Path, str]]:
    found = []
    for folder, package in SOURCES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder)
            if folder == "k3vl" and inside.parts[0] in {"kernels", "app"}:
                continue
            name = ".".join([package, *inside.with_suffix("").parts]).removesuffix(".__init__")
            found.append((path, name))
    return found


def part_of(module: str) -> tuple[int, str] | None:
    """Layer and member that a module belongs to."""
    for number, layer in enumerate(LAYERS):
        for member in layer:
            if module == member or module.startswith(member + "."):
                return number, member
    return None


def imported(path: Path, *, run_only: bool = False) -> list[str]:
    """Names that a file imports; with ``run_only`` not those that only type checkers see."""
    tree: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    return _imported(OnlyRun().visit(tree) if run_only else tree, path)


class OnlyRun(ast.NodeTransformer):
    """Drops ``if TYPE_CHECKING``."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else node


def _imported(tree: ast.AST, path: Path) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def violation(module: str, target: str) -> str | None:
    mine, theirs = part_of(module), part_of(target)
    if mine is None or theirs is None:
        return None
    if theirs[0] < mine[0]:
        return f"{module} imports {target}, which lies above it"
    same_layer = mine[0] == theirs[0] and mine[1] != theirs[1]
    if same_layer and mine[1] in SIBLINGS and theirs[1] in SIBLINGS:
        return f"{module} imports {target}, its sibling"
    return None


@pytest.mark.parametrize(("path", "name"), [pytest.param(*m, id=m[1]) for m in modules()])
def test_imports_point_down(path: Path, name: str) -> None:
    assert [v for target in imported(path) if (v := violation(name, target))] == []


def test_only_the_adapter_knows_transformers() -> None:
    users = {
        name
        for path, name in modules()
        for t in imported(path)
        if t.split(".")[0] == "transformers"
    }
    assert users
    assert all(name.startswith("k3vl.hf") for name in users)


def test_only_the_plugin_and_the_measured_peers_know_sglang() -> None:
    """Peers import it when their turn comes: nothing of it while the modules are loaded."""
    users = {
        name: path
        for path, name in modules()
        for t in imported(path)
        if t.split(".")[0] in {"sglang", "sgl_kernel"}
    }
    peers = "k3vl.kernels.bench.sglang_"
    assert any(name.startswith(peers) for name in users)
    for name, path in users.items():
        assert name.startswith(("k3vl.sglang.", peers))
        if name.startswith(peers):
            top = ast.parse(path.read_text(encoding="utf-8")).body
            loaded = [node for node in top if isinstance(node, ast.Import | ast.ImportFrom)]
            assert not [node for node in loaded if "sglang." in ast.unparse(node)]


def test_imports_go_in_no_circle() -> None:
    """Those inside of functions count as well."""
    known = {name for _, name in modules()}
    TopologicalSorter(
        {name: needs(imported(path, run_only=True), known) for path, name in modules()}
    ).prepare()


def needs(targets: list[str], known: set[str]) -> set[str]:
    """Modules among imported names: ``a.b.c`` is module ``a.b.c`` or else a name of ``a.b``."""
    wholes = {target if target in known else target.rpartition(".")[0] for target in targets}
    return wholes & known


def test_a_circle_would_be_found() -> None:
    names = {"k3vl.a", "k3vl.b"}
    graph = {"k3vl.a": needs(["k3vl.b.thing"], names), "k3vl.b": needs(["k3vl.a"], names)}
    with pytest.raises(CycleError):
        TopologicalSorter(graph).prepare()


def test_every_module_has_a_place() -> None:
    assert [name for _, name in modules() if part_of(name) is None and name != "k3vl"] == []


@pytest.mark.parametrize(
    ("module", "target"),
    [
        ("k3vl.xtml.render", "k3vl.vision.plan"),
        ("k3vl.kernels.kda", "k3vl.lm.batch.Batch"),
        ("k3vl.lm.model", "k3vl.pipeline.Pipeline"),
        ("k3vl.load", "k3vl.hf"),
        ("k3vl.hf.modeling", "k3vl.demo.geometry"),
        ("k3vl.errors", "k3vl.types"),
    ],
)
def test_the_rule_catches(module: str, target: str) -> None:
    assert violation(module, target)


def test_no_generic_dataclass_asks_for_a_slot_of_weak_references() -> None:
    """Python 3.12.3 forgets it (gh-118033), and Ubuntu 24.04 has that Python."""
    asked = [
        f"{name}.{node.name}"
        for path, name in modules()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and any("weakref_slot" in ast.unparse(decorator) for decorator in node.decorator_list)
        and any(isinstance(base, ast.Subscript) for base in node.bases)
    ]
    assert asked == []


def test_files_and_functions_stay_small() -> None:
    too_long = []
    for path, name in modules():
        source = path.read_text(encoding="utf-8")
        if source.count("\n") > 500:
            too_long.append(name)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                kernel = {"triton.jit", "gluon.jit"}
                if any(ast.unparse(decorator) in kernel for decorator in node.decorator_list):
                    continue  # a kernel cannot be cut into functions at will
                body_starts = node.body[0].end_lineno or node.lineno  # behind a docstring
                if node.end_lineno - body_starts > 60:
                    too_long.append(f"{name}.{node.name}")
    assert too_long == []
