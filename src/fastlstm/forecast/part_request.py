"""What a part was asked for, told before a model is loaded or a table is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fastlstm
from fastlstm.forecast.data.table_files import require_files, signature_of
from fastlstm.runs.find_run import published_run
from fastlstm.system.cache import make_key


def request_key(run: str | Path, tables: Sequence[str], options: Mapping[str, Any]) -> str:
    """Returns a text that changes with the run, with a file of the tables, and with an option.

    The same request names the same result; another one may do so too, such as that for a copy of
    the table on another machine.

    Args:
        run: a run directory, in which a model is published.
        tables: paths or URLs.
        options: JSON values.
    """
    manifest, _ = published_run(run).read_published(())
    model = {name: record.sha256 for name, record in manifest.files.items()}
    files = [signature_of(file) for table in tables for file in require_files(table) or ()]
    return make_key("part", fastlstm.__version__, model, files, dict(options))
