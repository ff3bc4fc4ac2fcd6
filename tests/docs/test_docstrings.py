"""Every name of the reference has a docstring that says what goes in and out, and which errors come."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fastlstm.errors

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
ARRAY = re.compile(r"\b(?:Tensor|NDArray|ndarray)\b")
SHAPE = re.compile(r"`\([^`]*\)`")
ERRORS = {name for name, kind in vars(fastlstm.errors).items() if isinstance(kind, type)}
HOOKS = re.compile(r"on_\w+|__\w+__")


def named(page: Path) -> list[str]:
    return re.findall(r"^::: (fastlstm[\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE)


def resolved(path: str) -> Any:
    module, _, name = path.rpartition(".")
    if path in ("fastlstm.keras", "fastlstm.errors"):
        return importlib.import_module(path)
    return getattr(importlib.import_module(module), name)


def members(path: str) -> Iterator[tuple[str, Any]]:
    """Yields a name of the reference, and the public methods and properties of a class."""
    value = resolved(path)
    yield path, value
    if inspect.ismodule(value):
        yield from ((f"{path}.{n}", v) for n, v in vars(value).items() if n in ERRORS)
    if not isinstance(value, type):
        return
    for name, member in vars(value).items():
        member = getattr(member, "__func__", member)
        if not name.startswith("_") and (
            inspect.isfunction(member) or isinstance(member, property)
        ):
            yield f"{path}.{name}", member


PATHS = [path for page in sorted(REFERENCE.glob("*.md")) for path in named(page)]
NAMES = dict(pair for path in PATHS for pair in members(path))


def told(path: str) -> str:
    """Returns a docstring; a method that overrides one may leave it to that."""
    value = NAMES[path]
    return inspect.getdoc(value) or ""


def raised(function: Any) -> set[str]:
    """Returns our errors that a function raises by itself."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    names = {ast.unparse(call.func) for call in calls if isinstance(call, ast.Call)}
    return names & ERRORS


@pytest.mark.parametrize("path", NAMES)
def test_a_public_name_says_what_it_is(path: str) -> None:
    doc, value = told(path), NAMES[path]
    assert doc.partition("\n")[0].rstrip().endswith((".", ":", ",")) or "\n" in doc, "no docstring"
    if not inspect.isfunction(value):
        return
    signature = inspect.signature(value)
    for name, parameter in signature.parameters.items():
        if name not in ("self", "cls") and not HOOKS.fullmatch(value.__name__):
            stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
            shown = stars.get(parameter.kind, "") + name
            assert re.search(rf"^ *(?:{re.escape(shown)}|{name}):|`{name}`", doc, re.M), name
    kinds = [parameter.annotation for parameter in signature.parameters.values()]
    if any(ARRAY.search(str(kind)) for kind in (*kinds, signature.return_annotation)):
        assert SHAPE.search(doc), "arrays, and no shape"
    assert not [name for name in raised(value) if name not in doc], "an error is not told"
