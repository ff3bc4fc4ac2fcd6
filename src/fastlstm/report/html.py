"""The parts of every HTML page: the document, tables, remarks, figures; and outputs of notebooks.

A page is one file and loads nothing: its content security policy allows its own styles, and the
script of a live page. All text of a run is escaped here or by `markup.to_html`.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import re
from collections.abc import Iterable, Mapping, Sequence

from fastlstm.report.events import Event
from fastlstm.report.lines import figure_text, forecast_name, score_form
from fastlstm.report.markup import MAX_TEXT, clipped, name_text, to_html

_FILES = importlib.resources.files("fastlstm.report")
STYLE = (_FILES / "report.css").read_text("utf-8")
"""The style of every page; its first colours are light, then dark."""
LIGHT, DARK = (
    dict(re.findall(r"--(\w+): (#\w+);", part))
    for part in STYLE.partition("* {")[0].split("@media")
)
"""The colours of every page by the names of their CSS variables."""


class Html(str):
    """A text that is HTML already: `table` does not escape it."""


def document(title: str, body: str, style: str = "", script: str = "") -> bytes:
    """Returns a whole page; `style` follows the common one."""
    policy, head = "default-src 'none'; style-src 'unsafe-inline'; ", ""
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
        policy += f"img-src data:; script-src 'sha256-{digest}'; connect-src 'self'; "
        head = '<link rel="icon" href="data:,">\n'  # a browser would ask the server for one
        script = f"<script>{script}</script>\n"
    policy += "base-uri 'none'; form-action 'none'"
    html = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{head}<title>{to_html(title)}</title>\n<style>\n{STYLE}{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}</main>\n{script}</body>\n</html>\n"
    )
    return html.encode("utf-8", "replace")


def table(
    heads: Iterable[str],
    rows: Iterable[Sequence[str]],
    best: int | None = None,
    kind: str = "",
) -> str:
    """Returns a table that scrolls when it is long; the row numbered `best` stays visible."""

    def line(cells: Iterable[str], tag: str) -> str:
        texts = [cell if isinstance(cell, Html) else to_html(cell) for cell in cells]
        kinds = [tag if text else "td" for text in texts]  # an empty heading is none
        return "".join(f"<{k}>{text}</{k}>" for k, text in zip(kinds, texts, strict=True))

    mark = ' class="best"'
    body = "".join(
        f"<tr{mark if at == best else ''}>{line(row, 'td')}</tr>\n" for at, row in enumerate(rows)
    )
    return (  # with keys, only what has the focus scrolls
        f'<div class="scroll {kind}" tabindex="0" role="group" aria-label="table">\n'
        f"<table><thead><tr>{line(heads, 'th')}</tr></thead>\n"
        f"<tbody>\n{body}</tbody></table></div>\n"
    )


def quiet(text: str) -> str:
    """Returns a paragraph in a quiet colour."""
    return f'<p class="quiet">{to_html(text)}</p>\n'


def figure(title: str, caption: str, svg: str) -> str:
    """Returns a drawing below its heading and its caption."""
    text = f"<h3>{to_html(title)}</h3><p>{to_html(caption)}</p>"
    return f"<figure><figcaption>{text}</figcaption>{svg}</figure>\n"


def scores_table(scores: Mapping[str, Event], about: Event) -> str:
    """Returns the errors of each forecast, the forecaster's in bold; `about` may have `season`."""
    names = list(
        dict.fromkeys(key for errors in scores.values() for key in errors if key != "season")
    )
    rows = [
        [forecast_name(name_text(who), about)]
        + [figure_text(errors, name, score_form(name)) for name in names]
        for who, errors in scores.items()
    ]
    best = list(scores).index("forecaster") if "forecaster" in scores else None
    return table(["", *map(name_text, names)], rows, best)


class InNotebook:
    """Base of objects that a notebook shows as a table of labels and texts, `_rows`."""

    def _rows(self) -> list[tuple[str, str]]:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        rows = [(label, clipped(text, MAX_TEXT)) for label, text in self._rows()]
        return output(table([type(self).__name__, ""], rows, kind="rows"))


def output(body: str) -> str:
    """Returns HTML for the output of a cell, in the colours of the notebook or the site around it;
    elsewhere of the browser."""
    style = (_FILES / "notebook.css").read_text("utf-8")
    for word, colours in (("light();", LIGHT), ("dark();", DARK)):
        style = style.replace(word, "".join(f"--{n}:{colour};" for n, colour in colours.items()))
    return f'<div class="fastlstm"><style>{style}</style>{body}</div>'
