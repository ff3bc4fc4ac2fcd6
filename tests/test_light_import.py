"""What an import loads; each question is asked of a fresh interpreter."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest

import fastlstm

HEAVY = {
    *("matplotlib", "pandas", "rich", "tensorboardX", "tensorboard", "tokenizers"),
    *("transformers", "fastapi", "starlette", "uvicorn", "aiohttp", "flask"),
}
"""Servers, plots, tokenizers, terminal and command-line libraries."""


def loaded_by(code: str) -> set[str]:
    """Returns the top-level modules a fresh interpreter holds after running `code`."""
    report = "import json, sys; print(json.dumps(sorted({n.split('.')[0] for n in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return set(names)


def test_the_probe_sees_what_is_loaded():
    assert "yaml" in loaded_by("import yaml")
    assert "yaml" not in loaded_by("pass")


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_by("import fastlstm") & (HEAVY | {"torch", "numpy"}) == set()


def test_using_every_public_name_loads_torch_and_nothing_else_that_is_heavy():
    code = """
import sys, torch
beside_torch = set(sys.modules)
import fastlstm
for name in fastlstm.__all__: getattr(fastlstm, name)
for name in beside_torch - {"sys"}: del sys.modules[name]
"""
    assert loaded_by(code) & HEAVY == set()


def test_public_names_are_the_same_in_every_list():
    assert sorted(fastlstm.__all__) == fastlstm.__dir__()
    errors = {name for name in vars(fastlstm) if name.endswith(("Error", "Stopped"))}
    assert set(fastlstm.__all__) == {*fastlstm._HOMES, *errors, "__version__"}
    with open(fastlstm.__file__, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    typed = {
        alias.name: node.module
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == fastlstm._HOMES


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'fastlstm' has no attribute 'trian'"):
        fastlstm.trian  # noqa: B018
