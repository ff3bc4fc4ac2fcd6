"""Where the events of a run go besides the screen: metrics.jsonl and TensorBoard."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Observer = Callable[[Event], None]

NOT_STORED = frozenset({"prepare"})
_SCALARS = {
    "step": (
        "loss",
        "bits_per_char",
        "lr",
        "grad_norm",
        "tokens_per_s",
        "ceiling_share",
        "input_wait_share",
    ),
    "eval": ("loss", "bits_per_char", "bits_per_byte", "perplexity"),
}


def event_line(event: Event) -> str:
    """Returns an event as one line of strict JSON; NaN and Inf become null."""
    return json.dumps(_finite(event), ensure_ascii=False, separators=(",", ":")) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class MetricsFile:
    """Appends events to metrics.jsonl, one line each, flushed at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def __call__(self, event: Event) -> None:
        if event["event"] not in NOT_STORED:
            self._file.write(event_line(event))
            self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardWriter:
    """Writes step and eval events as TensorBoard scalars, samples as text."""

    def __init__(self, directory: Path, first_step: int) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=first_step or None, flush_secs=10)

    def __call__(self, event: Event) -> None:
        kind = event["event"]
        group = "train" if kind == "step" else event.get("split", "valid")
        for name in _SCALARS.get(kind, ()):
            value = event.get(name)
            if value is not None:
                self._writer.add_scalar(f"{group}/{name}", value, event["step"])
        if kind == "sample":
            self._writer.add_text("sample", event["text"], event["step"])

    def close(self) -> None:
        self._writer.close()
