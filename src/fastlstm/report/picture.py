"""Pictures of forecasts and of training: matplotlib figures, in a notebook light or dark."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from fastlstm.errors import DataError
from fastlstm.report import drawing
from fastlstm.report.charts import forecast_panel, quality_panel
from fastlstm.report.drawing import SMALL_INCHES, Panel, add_panels, embed, form_of
from fastlstm.report.events import Event
from fastlstm.report.history import read_history
from fastlstm.report.html import DARK, LIGHT, output
from fastlstm.report.markup import name_text
from fastlstm.system.storage import write_file

_LARGE_INCHES = (7.2, 3.4)


class Picture(Figure):
    """A matplotlib Figure in light colours. A notebook shows it light or dark.

    Args:
        panels: at least one.
        label: the content in a few words, for readers of screens.
        is_dark: draw it in dark colours.

    Attributes:
        panels: the panels, row by row.
    """

    def __init__(self, panels: Sequence[Panel], label: str, is_dark: bool = False) -> None:
        super().__init__(label=label)
        self.panels = list(panels)
        columns = 1 if len(panels) == 1 else 2 if len(panels) <= 4 else 3
        size = _LARGE_INCHES if len(panels) == 1 else SMALL_INCHES
        add_panels(self, panels, size, columns, DARK if is_dark else LIGHT)

    def save(self, path: str | Path, dark: bool = False) -> Path:
        """Writes an SVG or a PNG, by the suffix of `path`, and returns the path.

        Args:
            path: the file.
            dark: light lines on dark paper, drawn anew from `panels`.

        Raises:
            ConfigError: another suffix.
            StorageError: the disk refused.
        """
        form = form_of(path)
        figure = Picture(self.panels, str(self.get_label()), is_dark=True) if dark else self
        write_file(path := Path(path), drawing.written(figure, form))
        return path

    def _repr_html_(self) -> str:
        svg = drawing.written(self, "svg")
        name, width = f"fastlstm-{zlib.crc32(svg):08x}", round(96 * self.get_figwidth())
        drawn = embed(svg, name, str(self.get_label()))
        return output(f'<div style="max-width:{width}px">{drawn}</div>')


def forecast_picture(events: Sequence[Event]) -> Picture:
    """Returns a panel of each event `forecast`; without ``actual`` if it is unknown."""
    panels = [forecast_panel(event, _title(event, len(events))) for event in events]
    return Picture([panel for panel in panels if panel is not None], "Forecasts")


def training_picture(run_dir: Path) -> Picture:
    """Returns the loss of the training steps and validations of a run directory, by units; by steps
    if no step event tells the units. Raises DataError: the run has no such points yet."""
    history = read_history(run_dir / "metrics.jsonl")
    for key, unit in (("units", history.unit), ("step", "steps")):
        if (panel := quality_panel(history, key, unit)) is not None:
            return Picture([panel], f"{history.measure.title} by {unit}")
    raise DataError(
        f"'{run_dir}/metrics.jsonl' is missing, or has no evaluation and fewer than two steps to"
        " draw; train on, with a smaller `log_every` or `eval_every`"
    )


def _title(event: Event, count: int) -> str:
    title = ""
    if event.get("series") is not None:
        title = name_text(event["series"])
    elif count > 1:
        title = name_text(event["target"])
    return title if len(title) <= 40 else title[:40] + "…"
