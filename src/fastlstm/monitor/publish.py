"""`fastlstm publish RUN --to csv`: the metrics of a run for other tools."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastlstm.errors import ConfigError, RunDirectoryError, Setting
from fastlstm.monitor.csv_file import csv_table
from fastlstm.monitor.published_rows import published_rows
from fastlstm.runs.find_run import require_run
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system.storage import write_file

TARGETS = ("csv",)


@dataclass(frozen=True)
class PublishReport:
    """What was published.

    Attributes:
        run: the run directory.
        to: the target.
        where: the file.
        rows: steps with at least one number or text.
        last_step: of these, or None.
    """

    run: str
    to: str
    where: str
    rows: int
    last_step: int | None

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it for JSON."""
        return asdict(self)


def publish(
    run: str | os.PathLike[str],
    *,
    to: str = "csv",
    out: str | os.PathLike[str] | None = None,
    name: str | None = None,
) -> PublishReport:
    """Writes the metrics of a run, which may still be training, for other tools.

    The file is written anew as a whole, so publishing again repeats nothing. The run is only read.

    Args:
        run: a run directory.
        to: "csv".
        out: the file; default is RUN.csv beside the run.
        name: of the run in the table; default is that of its directory.

    Raises:
        ConfigError: another target.
        RunDirectoryError: no run, or one without metrics.
        StorageError: the file cannot be written.
    """
    if to not in TARGETS:
        raise ConfigError(Setting("to", to), f": expected one of {', '.join(TARGETS)}")
    require_run(run)
    directory = RunDirectory(run)
    rows = published_rows(directory.metrics_path)
    if not rows:
        raise RunDirectoryError(f"{directory.path} has no metrics to publish: no step was recorded")
    place = directory.path.absolute()
    where = place.with_name(f"{place.name}.csv") if out is None else Path(out)
    write_file(where, csv_table(rows, place.name if name is None else name))
    return PublishReport(str(directory.path), to, str(where), len(rows), rows[-1].step)
