"""What was measured on this machine before, in the user's cache: how fast things go, nothing else.

``<cache>/measured/<kind>-<SHA-256>.json`` holds what was measured and of what. The name and the
content say the machine, the versions and the shape, so that a measurement of anything else is never
found. Files are replaced whole: two processes may both measure, one of them stays. A file that is
damaged, or a cache that cannot be written, costs the measurement and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastlstm.errors import FastLSTMError
from fastlstm.system import environment, storage

_FORMAT = 1


def directory() -> Path:
    """Returns where measurements are kept; it need not exist yet. Deleting it is always safe."""
    return environment.cache_dir() / "measured"


def recall(kind: str, of: Mapping[str, object]) -> dict[str, Any] | None:
    """Returns what `remember` stored of exactly the same, or None.

    Args:
        kind: what was measured.
        of: machine, versions, shapes: plain JSON values.
    """
    try:
        content = storage.read_json(_path(kind, of))
    except (OSError, FastLSTMError):
        return None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        return None
    value = content.get("value")
    return value if content.get("of") == dict(of) and isinstance(value, dict) else None


def remember(kind: str, of: Mapping[str, object], value: Mapping[str, object]) -> None:
    """Stores a measurement; where that is not possible the next process measures again."""
    content = {"format": _FORMAT, "of": dict(of), "value": dict(value)}
    try:
        directory().mkdir(parents=True, exist_ok=True)
        storage.write_json(_path(kind, of), content)
    except (OSError, FastLSTMError):
        pass


def note(what: str) -> str:
    """Returns the sentence that says that `what` was not measured in this run."""
    return f"{what} measured earlier on this machine; delete {directory()} to measure again"


def _path(kind: str, of: Mapping[str, object]) -> Path:
    text = json.dumps(dict(of), sort_keys=True)
    return directory() / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()}.json"
