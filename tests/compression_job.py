"""A call of `compress`, for tests of its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastlstm.compression.job import Job
from fastlstm.compression.options import CompressConfig


def make_job(run: Path, out: Path, config: CompressConfig, data: Any = None) -> Job:
    return Job(
        run=run, out=out, data=data, config=config, given=frozenset(), resume=False, observers=[],
        callbacks=(), stop=None, started=0.0,
    )  # fmt: skip
