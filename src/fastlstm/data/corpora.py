"""Built-in corpora: text that every Python installation already holds, so nothing is downloaded."""

from __future__ import annotations

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
            "this Python has no pydoc_data, which python-docs is made of;"
            " use python-stdlib or a file of your own"
        ) from error
    return "\n".join(str(topics[title]) for title in sorted(topics))


def corpus_files() -> list[Path]:
    """Returns the standard library's ``.py`` files without its tests, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if not _SKIPPED_DIRECTORIES.intersection(path.relative_to(root).parts) and path.is_file()
    ]
    files = [path for path in files if path.stat().st_size]
    if not files:
        raise DataError(
            f"this Python keeps no source of its standard library in {root};"
            " use python-docs or a file of your own"
        )
    return files
