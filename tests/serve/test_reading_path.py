"""The files from a completion request to its tokens; docs/serving.md lists them."""

import ast
import re
from pathlib import Path

SERVE = Path(__file__).resolve().parents[2] / "src" / "fastlstm" / "serve"
START = "serve/text/completions.py"
MAX_FILES = 7
MIDDLEWARE = {"service", "settings", "metrics", "times", "log"}
"""What every route has, besides serve/http: the server's state, options, counters and log."""


def imported(path):
    """The files of fastlstm that a file imports, also those only for types."""
    source = SERVE.parent
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fastlstm."):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    files = (source.joinpath(*str(name).split(".")[1:]).with_suffix(".py") for name in names)
    return {file for file in files if file.is_file()}


def is_middleware(path):
    return path.parent.name == "http" or (path.parent == SERVE and path.stem in MIDDLEWARE)


def reading_path():
    """Files of serve that can be reached from the route without middleware, and the decoder."""
    reached, todo = set(), [SERVE.parent / START]
    decoder = SERVE.parent / "text" / "decoder.py"
    while todo:
        path = todo.pop()
        reached.add(path)
        todo += [
            file
            for file in imported(path) - reached
            if file == decoder or (SERVE in file.parents and not is_middleware(file))
        ]
    return {path.relative_to(SERVE.parent).as_posix() for path in reached}


def test_a_request_reaches_its_tokens_in_few_files():
    assert START in reading_path()
    assert "text/decoder.py" in reading_path()
    assert len(reading_path()) <= MAX_FILES, sorted(reading_path())


def test_the_documentation_lists_these_files(repository):
    text = (repository / "docs" / "serving.md").read_text(encoding="utf-8")
    section = text.partition("## How it works")[2].partition("\n## ")[0]
    listed = re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.MULTILINE)
    assert listed[0] == START
    assert set(listed) == reading_path()
    assert len(listed) == len(set(listed))
