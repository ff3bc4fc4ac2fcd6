"""Every name of the reference says what goes in, what comes out, and which errors it raises."""

import ast
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import pytest

import fastlstm.errors

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
ARRAY = re.compile(r"\b(?:Tensor|NDArray|ndarray)\b")
SHAPE = re.compile(r"`\([^`]*\)`")
ERRORS = {name for name, kind in vars(fastlstm.errors).items() if isinstance(kind, type)}
KNOWN = {"self", "cls", "trainer", "T", "B"}
"""Parameters that a class or the list of sizes describes."""


def named(page):
    return re.findall(r"^::: (fastlstm[\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE)


def resolved(path):
    module, _, name = path.rpartition(".")
    if path in ("fastlstm.keras", "fastlstm.errors"):
        return importlib.import_module(path)
    return getattr(importlib.import_module(module), name)


def members(path):
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


def told(path):
    """Returns a docstring, with those of the methods of the class that it names."""
    doc, owner = inspect.getdoc(NAMES[path]) or "", path.rpartition(".")[0]
    named = [NAMES.get(f"{owner}.{name}") for name in re.findall(r"`(\w+)`", doc)]
    return "\n".join([doc, *(inspect.getdoc(value) or "" for value in named)])


def raised(function):
    """Returns our errors that a function raises by itself."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    names = {ast.unparse(call.func) for call in calls if isinstance(call, ast.Call)}
    return names & ERRORS


def is_told(error, doc):
    """Whether a docstring names an error or one that it derives from."""
    kinds = getattr(fastlstm.errors, error).__mro__
    return any(re.search(rf"\b{kind.__name__}\b", doc) for kind in kinds)


@pytest.mark.parametrize("path", NAMES)
def test_a_public_name_says_what_goes_in_and_out(path):
    value, doc = NAMES[path], told(path)
    assert doc.strip(), "no docstring"
    if not inspect.isfunction(value):
        return
    signature = inspect.signature(value)
    parameters = [
        parameter for name, parameter in signature.parameters.items() if name not in KNOWN
    ]
    faults = [
        f"nothing about {parameter.name}"
        for parameter in parameters
        if not re.search(rf"^ *\**{parameter.name}\b.*:|`{parameter.name}`", doc, re.MULTILINE)
        and not value.__name__.startswith(("on_", "__"))
    ]
    kinds = [*(parameter.annotation for parameter in parameters), signature.return_annotation]
    if any(ARRAY.search(str(kind)) for kind in kinds) and not SHAPE.search(doc):
        faults.append("arrays without a shape")
    faults += [f"nothing about {name}" for name in raised(value) if not is_told(name, doc)]
    assert faults == []
