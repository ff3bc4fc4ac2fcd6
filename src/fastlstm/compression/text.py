"""Compressing a text model."""

from __future__ import annotations

from fastlstm.compression.options import Job
from fastlstm.compression.report import CompressReport


def compress_text(job: Job) -> CompressReport:
    """Rounds a text model, or trains a smaller one, and measures it beside its source."""
    raise NotImplementedError
