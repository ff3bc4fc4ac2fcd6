"""Compressing a forecaster."""

from __future__ import annotations

from fastlstm.compression.options import Job
from fastlstm.compression.report import CompressReport


def compress_forecaster(job: Job) -> CompressReport:
    """Rounds a forecaster, or trains a smaller one, and measures it beside its source."""
    raise NotImplementedError
