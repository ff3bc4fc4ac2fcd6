"""Pictures of forecasts for a notebook or a file, a panel per series, light or dark."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fastlstm.errors import ConfigError
from fastlstm.report import drawing
from fastlstm.report.charts import forecast_panel
from fastlstm.report.drawing import SMALL_INCHES, Panel, embed
from fastlstm.report.html import STYLE
from fastlstm.report.markup import name_text
from fastlstm.system.storage import write_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastlstm.report.events import Event

_LARGE_INCHES = (7.2, 3.4)
_VARIABLE = re.compile(r"--(\w+): (#\w+);")


class Picture:
    """A figure of forecasts. A notebook shows it; `save` writes it.

    Args:
        events: events `forecast`, a panel each; without ``actual`` if it is unknown.

    Attributes:
        panels: the panels, row by row.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        panels = [forecast_panel(event, _title(event, len(events))) for event in events]
        self.panels: list[Panel] = [panel for panel in panels if panel is not None]
        self._columns = 1 if len(panels) == 1 else 2 if len(panels) <= 4 else 3
        self._size = _LARGE_INCHES if len(panels) == 1 else SMALL_INCHES

    def save(self, path: str | Path, dark: bool = False) -> Path:
        """Writes an SVG or a PNG, by the suffix of `path`, and returns the path.

        Args:
            path: the file.
            dark: light lines on dark paper.

        Raises:
            ConfigError: another suffix.
            StorageError: the disk refused.
        """
        path = Path(path)
        form, colours = form_of(path), _palette(dark)
        write_file(path, drawing.render(self.panels, self._size, self._columns, form, colours))
        return path

    def _repr_html_(self) -> str:
        svg = drawing.render(self.panels, self._size, self._columns)
        name = f"fastlstm-{zlib.crc32(svg):08x}"
        light, dark = (
            "".join(f"--{key}:{colour};" for key, colour in _palette(is_dark).items())
            for is_dark in (False, True)
        )
        width = round(96 * self._size[0] * self._columns)
        return (
            f"<style>#{name}{{{light}background:var(--paper);max-width:{width}px}}"
            f"@media (prefers-color-scheme:dark){{#{name}{{{dark}}}}}</style>"
            f'<div id="{name}">{embed(svg, name, "Forecasts")}</div>'
        )


def form_of(path: str | Path) -> Literal["svg", "png"]:
    """Returns the kind of picture by a file's suffix. Raises ConfigError for another suffix."""
    suffix = Path(path).suffix.lower()
    if suffix == ".svg":
        return "svg"
    if suffix == ".png":
        return "png"
    raise ConfigError(f"the picture is '{path}', expected a file name ending in .svg or .png")


def _title(event: Event, count: int) -> str:
    title = ""
    if event.get("series") is not None:
        title = name_text(event["series"])
    elif count > 1:
        title = name_text(event["target"])
    return title if len(title) <= 40 else title[:40] + "…"


def _palette(is_dark: bool) -> dict[str, str]:
    light, _, dark = STYLE.partition("@media")
    return dict(_VARIABLE.findall(dark.partition("* {")[0] if is_dark else light))
