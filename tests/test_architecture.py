"""The structure of the source, held by a table: who may import whom, how long things may be.

docs/architecture.md draws the same picture; change both together.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parent.parent / "src" / "fastlstm"

RANKS = (
    ("__version__", "_native", "errors"),
    ("estimator", "system"),
    ("report", "distributed"),
    ("runs",),
    ("ops",),
    ("nn",),
    ("keras", "training"),
    ("text", "forecast", "sequence"),
    ("compression", "exchange"),
    ("tuning", "monitor"),
    ("serve", "ray"),
    ("cli",),
    ("__main__",),
)
"""What is in a row may import from the rows above it, and from its own folder."""

LAYERS = {name: rank for rank, names in enumerate(RANKS) for name in names}

SOFT_LINES, HARD_LINES, FUNCTION_LINES = 700, 1000, 50
SHARE_ABOVE_SOFT = 0.1
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "tools"}


def python_files() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def native_files() -> list[Path]:
    return sorted(path for path in (SRC / "csrc").rglob("*") if path.suffix in (".h", ".cpp"))


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, importer: str, is_package: bool) -> set[str]:
    """Returns the dotted fastlstm names a file imports, wherever in it the import stands."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = importer.split(".")
                top = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*top, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "fastlstm" and "." in name}


def part(name: str) -> str:
    return name.split(".")[1]


def import_faults(source: str, importer: str, is_package: bool = False) -> list[str]:
    """Returns one sentence per import that does not go down."""
    own = part(importer)
    faults = []
    for name in sorted(imported(ast.parse(source), importer, is_package)):
        other = part(name)
        if other == own:
            continue
        if other not in LAYERS:
            faults.append(f"{importer} imports {name}, which has no layer in the table")
        elif LAYERS[other] >= LAYERS[own]:
            faults.append(
                f"{importer} (L{LAYERS[own]}) imports {name} (L{LAYERS[other]}): imports go down"
            )
    return faults


def long_functions(source: str) -> list[str]:
    """Returns the functions of more than FUNCTION_LINES lines, their docstring not counted."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        first = node.body[0]
        if ast.get_docstring(node) is not None:
            lines -= (first.end_lineno or first.lineno) - first.lineno + 1
        if lines > FUNCTION_LINES:
            found.append(f"{node.name} ({lines} lines)")
    return found


def environment_uses(source: str) -> list[str]:
    """Returns the places that touch environment variables."""
    names = {"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"}
    tree = ast.parse(source)
    found = [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in names
    ]
    found += [
        f"line {node.lineno}: from os import {alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "os"
        for alias in node.names
        if f"os.{alias.name}" in names
    ]
    return found


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Returns one cycle of the graph, or nothing."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph.get(name, ())):
            found = visit(other, [*trail, name])
            if found:
                return found
        done.add(name)
        return []

    for name in sorted(graph):
        found = visit(name, [])
        if found:
            return found
    return []


def load_time_graph() -> dict[str, set[str]]:
    """Returns module -> fastlstm modules that are loaded when it is."""
    sources = {module_name(path): path for path in python_files()}
    graph: dict[str, set[str]] = {}
    for name, path in sources.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        graph[name] = set()
        for target in imported(tree, name, path.name == "__init__.py"):
            module = target if target in sources else target.rpartition(".")[0]
            if module in sources and module not in (name, "fastlstm"):
                graph[name].add(module)
    return graph


def test_imports_go_down_only():
    faults = []
    for path in python_files():
        name = module_name(path)
        if name == "fastlstm":
            continue  # re-exports lazily; test_light_import holds what it loads
        assert part(name) in LAYERS, f"{name} has no layer: add it to the table and to the document"
        source = path.read_text(encoding="utf-8")
        faults += import_faults(source, name, path.name == "__init__.py")
    assert faults == []


def test_no_import_cycle():
    assert cycle(load_time_graph()) == []


def test_one_module_reads_the_environment():
    faults = {
        module_name(path): uses
        for path in python_files()
        if path.name != "environment.py"
        and (uses := environment_uses(path.read_text(encoding="utf-8")))
    }
    assert faults == {}


def test_files_are_of_readable_size():
    sizes = {
        str(path.relative_to(SRC)): len(path.read_text(encoding="utf-8").splitlines())
        for path in [*python_files(), *native_files()]
    }
    assert {name: size for name, size in sizes.items() if size > HARD_LINES} == {}
    above = {name: size for name, size in sizes.items() if size > SOFT_LINES}
    assert len(above) <= max(1, SHARE_ABOVE_SOFT * len(sizes)), above


def test_functions_fit_on_a_screen():
    found = {p: long_functions(p.read_text(encoding="utf-8")) for p in python_files()}
    assert {path: names for path, names in found.items() if names} == {}


def test_files_are_named_for_what_they_hold():
    paths = [*python_files(), *native_files(), *(Path(__file__).parent.rglob("*.py"))]
    assert [str(path) for path in paths if path.stem in VAGUE_NAMES] == []


def test_no_two_classes_have_one_name():
    names = [
        node.name
        for path in python_files()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    assert {name for name in names if names.count(name) > 1} == {"LSTM"}  # ours, and of Keras


def test_every_directory_of_python_is_a_package():
    directories = {path.parent for path in python_files()}
    assert [str(d) for d in sorted(directories) if not (d / "__init__.py").exists()] == []


def test_native_code_knows_neither_torch_nor_python():
    for path in native_files():
        includes = [
            line for line in path.read_text(encoding="utf-8").splitlines() if "#include" in line
        ]
        assert not [line for line in includes if "torch" in line or "ATen" in line], path
        if not path.name.endswith("bindings.cpp"):
            assert not [line for line in includes if "nanobind" in line or "Python.h" in line], path


def test_no_instruction_set_of_the_build_machine(repository):
    build = (repository / "CMakeLists.txt").read_text(encoding="utf-8")
    code = "\n".join(line.partition("#")[0] for line in build.splitlines())
    sets = {"armv8.2-a+dotprod", "armv8.2-a+dotprod+i8mm+bf16"}
    assert set(re.findall(r"-march=([^ ;\")]+)", code)) == sets, "each of one set alone"
    assert "-mtune" not in code


# The checks themselves must be able to fail.


@pytest.mark.parametrize(
    ("source", "importer"),
    [
        ("import fastlstm.nn.lstm", "fastlstm.ops.registry"),
        ("from fastlstm.training import schedule", "fastlstm.nn.lstm"),
        ("from fastlstm import serve", "fastlstm.text.trainer"),
        ("from fastlstm.text import files", "fastlstm.system.tensors"),
        ("def f():\n    from fastlstm.cli import main", "fastlstm.text.train"),
        ("from ..forecast import config", "fastlstm.text.trainer"),
        ("from fastlstm.unheard import of", "fastlstm.text.train"),
    ],
)
def test_an_import_upwards_is_seen(source, importer):
    assert len(import_faults(source, importer)) == 1


@pytest.mark.parametrize(
    ("source", "importer"),
    [
        ("from fastlstm.text.data.tokenizer import Tokenizer", "fastlstm.text.files"),
        ("from fastlstm import errors, __version__", "fastlstm.system.hardware"),
        ("from . import trainer\nimport torch", "fastlstm.text.train"),
        ("from fastlstm.text.train import train", "fastlstm.cli.train"),
    ],
)
def test_an_import_downwards_passes(source, importer):
    assert import_faults(source, importer) == []


def test_long_functions_and_environment_uses_are_seen():
    body = "\n".join("    x = 1" for _ in range(FUNCTION_LINES))
    assert long_functions(f"def f():\n{body}") == ["f (51 lines)"]
    assert long_functions(f'def f():\n    """One.\n    Two."""\n{body[10:]}') == []
    assert len(environment_uses("import os\nx = os.environ['A'], os.getenv('B')")) == 2
    assert len(environment_uses("from os import environ")) == 1


def test_cycles_are_seen():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
