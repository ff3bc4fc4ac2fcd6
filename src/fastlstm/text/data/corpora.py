"""Built-in corpora: text from the Python installation; nothing is downloaded."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from fastlstm.errors import DataError

BUILT_IN = {
    "python-docs": "the language reference behind help(), 0.5 MB of English",
    "python-stdlib": "the standard library's Python source, 12 MB",
}
_SKIPPED_DIRECTORIES = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib-dynload"}
)


def corpus_text() -> str:
    """Returns the topics of `pydoc_data`, sorted by title and joined by a newline."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "python-docs needs pydoc_data, which this Python lacks; use python-stdlib or a file"
        ) from error
    return "\n".join(str(topics[title]) for title in sorted(topics))


def corpus_files() -> list[Path]:
    """Returns the standard library's ``.py`` files without its tests, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for directory, names, leaves in os.walk(root):
        names[:] = [name for name in names if name not in _SKIPPED_DIRECTORIES]
        paths = (Path(directory, leaf) for leaf in leaves if leaf.endswith(".py"))
        files += [path for path in paths if path.is_file() and path.stat().st_size]
    files.sort()
    if not files:
        raise DataError(
            f"this Python lacks the source of its standard library in {root}; use python-docs or a"
            " file"
        )
    return files
