"""The pages at `/`: one to try a text model, one that describes a forecaster.

Each is served as one file. Its policy allows only its own script and style, by their digests; text
from the model, such as names of columns, is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
import re
from typing import TYPE_CHECKING
from urllib.parse import quote

from fastlstm.errors import DataError, counted
from fastlstm.report.markup import MAX_TEXT, clipped, name_text, to_html

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastlstm.forecast.window_forecaster import Columns, WindowForecaster
    from fastlstm.serve.forecast.engine import ForecastEngine
    from fastlstm.serve.forecast.tensors import TensorSpec
    from fastlstm.text.data.tokenizer import Tokenizer

_PROMPTS = ("Once upon a time", "The ", "the ")
_NUM_LETTERS = 8
_LINE = "\n"
LOCKED_HTML = """<h1>fastlstm</h1>
<p>This server has API keys. With one of them this page shows its model.</p>
<form id="form">
<label>API key <input id="key" type="password" autocomplete="off" required></label>
<button>Show</button>
<p id="trouble" role="alert"></p>
</form>"""
_HOST = re.compile(r"[A-Za-z0-9.:\[\]-]{1,255}", re.ASCII)


class Page:
    """A page of this package with placeholders such as ``{{name}}``; `headers` go with it."""

    def __init__(self, name: str) -> None:
        folder = importlib.resources.files("fastlstm.serve")
        style = (folder / "style.css").read_text("utf-8")
        self._html = (folder / name).read_text("utf-8").replace("{{style}}", style)
        self.headers = {
            "content-security-policy": (
                f"default-src 'none'; script-src {self._digest('script')};"
                f" style-src {self._digest('style')}; connect-src 'self'; img-src data:;"
                " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            ),
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
            "vary": "authorization",
        }

    def _digest(self, tag: str) -> str:
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", self._html, re.DOTALL)
        digest = hashlib.sha256(text.encode("utf-8")).digest()
        return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"

    def filled(self, **parts: str) -> bytes:
        """Returns the page with HTML in place of its placeholders."""
        html = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], self._html)
        return html.encode("utf-8")


def example_prompt(tokenizer: Tokenizer) -> str:
    """Returns a prompt that a model can read: a usual one, else letters of its vocabulary."""
    for text in _PROMPTS:
        try:
            tokenizer.encode(text)
        except DataError:
            continue
        return text
    letters = (piece.decode("utf-8", "ignore") for piece in tokenizer.pieces)
    return "".join(text for text in letters if len(text) == 1 and text.isalnum())[:_NUM_LETTERS]


def forecaster_html(engine: ForecastEngine, host: str, key: str | None) -> str:
    """Returns the description of a forecaster at `host`; `key` as of `Examples`."""
    model = engine.model
    address = host if _HOST.fullmatch(host) else "localhost"
    path = f"/v2/models/{quote(engine.name, safe='')}"
    every = "" if model.frequency == "rows" else f", one every {model.frequency.removeprefix('1 ')}"
    targets = _names_text(model.targets)
    ahead = f"the next {model.horizon} steps" if model.horizon > 1 else "the next step"
    examples = Examples(model, engine.inputs, f"http://{address}{path}/infer", key)
    return (
        f"<h1>fastlstm <small>{to_html(name_text(engine.name))}</small></h1>\n"
        "<p>A forecaster, served by the Open Inference Protocol. It reads"
        f" {counted(model.input_size, 'row')}{every}, and forecasts {ahead} of"
        f" {to_html(targets)}.</p>\n"
        f"<h2>What it takes</h2>\n{_table(engine.inputs, model)}\n"
        f"<h2>What it gives</h2>\n{_table(engine.outputs, model)}\n"
        "<p class=quiet>B is how many windows one request has. Quantiles are given where the"
        ' request has "parameters": {"quantiles": [0.1, 0.9]}.</p>\n'
        f"<h2>An example in a shell</h2>\n<pre>{to_html(examples.shell(), keep=_LINE)}</pre>\n"
        f"<h2>An example in Python</h2>\n<pre>{to_html(examples.python(), keep=_LINE)}</pre>\n"
        "<p class=quiet>Both send the means of the training rows, repeated; replace them with your"
        " own rows, oldest first.</p>\n"
        f'<h2>More</h2>\n<p><a href="{path}">inputs and outputs as JSON</a>'
        ' · <a href="/openapi.json">OpenAPI</a> · <a href="/metrics">metrics</a>'
        ' · <a href="/health/ready">health</a></p>'
    )


def _names_text(names: tuple[str, ...]) -> str:
    return clipped(", ".join(map(name_text, names)), MAX_TEXT)


def _table(specs: Mapping[str, TensorSpec], model: WindowForecaster) -> str:
    rows = [
        (spec.name, spec.datatype, _shape_text(spec, model), _names_text(spec.columns))
        for spec in specs.values()
    ]
    body = "".join(
        "<tr>" + "".join(f"<td>{to_html(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    heads = "".join(f"<th>{name}</th>" for name in ("tensor", "type", "shape", "last axis"))
    return f"<div class=scroll><table><tr>{heads}</tr>{body}</table></div>"


def _shape_text(spec: TensorSpec, model: WindowForecaster) -> str:
    sizes = ["B" if axis == 0 else str(size) for axis, size in enumerate(spec.shape)]
    if spec.name.startswith("past"):
        sizes[1] = str(model.input_size)
    return f"({', '.join(sizes)})".replace("-1", "levels")


class Examples:
    """Example programs that request a forecast; `key` stands for the API key, None without keys."""

    def __init__(
        self, model: WindowForecaster, inputs: Mapping[str, TensorSpec], url: str, key: str | None
    ) -> None:
        self._model, self._inputs, self._url, self._key = model, inputs, url, key

    def _sizes(self, spec: TensorSpec) -> list[int]:
        lead = {"past": [1, self._model.input_size], "future": [1, self._model.horizon]}
        return [*lead.get(spec.name.removesuffix("_names"), [1]), len(spec.columns)]

    def _row(self, spec: TensorSpec) -> list[float | str]:
        """Returns a row of a tensor: means of the training rows, or a name of each column."""
        columns: Columns = getattr(self._model, spec.name.removesuffix("_names"))
        if spec.datatype == "BYTES":
            return [min(columns.codes[name], key=len) for name in spec.columns]
        digits = 6 if spec.datatype == "FP32" else 15
        return [float(f"{self._model.typical(name):.{digits}g}") for name in spec.columns]

    def shell(self) -> str:
        """Returns a command for any shell of the Bourne family."""
        tensors = []
        for spec in self._inputs.values():
            *lead, _ = sizes = self._sizes(spec)
            row = json.dumps(self._row(spec))[1:-1].replace("'", "\\u0027")
            about = f'"name": "{spec.name}", "shape": {sizes}, "datatype": "{spec.datatype}"'
            tensors.append(f"  {{{about},\n   \"data\": [$(repeat {lead[-1]} '{row}')]}}")
        key = "" if self._key is None else f" -H 'authorization: Bearer {self._key}'"
        return (
            'repeat() { yes " $2" | head -n "$1" | paste -sd , -; }\n'
            f"curl -sS '{self._url}' -H 'content-type: application/json'{key} -d @- <<END\n"
            '{"inputs": [\n' + ",\n".join(tensors) + "\n]}\nEND\n"
        )

    def python(self) -> str:
        """Returns a program that needs the standard library only."""
        rows, tensors = [], []
        for spec in self._inputs.values():
            *lead, _ = sizes = self._sizes(spec)
            names = _names_text(spec.columns)
            count = lead[-1]
            rows.append(f"# rows of {names}\n{spec.name} = [{self._row(spec)!a}] * {count}\n")
            data = f"[{spec.name}]" if len(lead) > 1 else spec.name
            about = f'"name": "{spec.name}", "shape": {sizes}, "datatype": "{spec.datatype}"'
            tensors.append(f'    {{{about}, "data": {data}}},\n')
        key = "" if self._key is None else f', "authorization": "Bearer {self._key}"'
        return (
            "import json\nimport urllib.request\n\n"
            + "".join(rows)
            + "inputs = [\n"
            + "".join(tensors)
            + f']\nurl = "{self._url}"\nheaders = {{"content-type": "application/json"{key}}}\n'
            'body = json.dumps({"inputs": inputs}).encode()\n'
            "with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:\n"
            '    (forecast,) = json.load(answer)["outputs"]\n'
            'print(forecast["shape"], forecast["data"])\n'
        )
