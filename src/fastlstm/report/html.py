"""The parts of every HTML page: the document, tables, remarks and figures.

A page is one file and loads nothing: its content security policy allows its own styles, and the
script of a live page. All text of a run is escaped here or by `markup.to_html`.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
from typing import TYPE_CHECKING

from fastlstm.report.markup import to_html

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

STYLE = (importlib.resources.files("fastlstm.report") / "report.css").read_text("utf-8")
"""The style of every page; its first colours are light, then dark."""


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
