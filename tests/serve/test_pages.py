"""The pages at `/`: their content, and that the example works."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv

from fastlstm import Forecaster
from fastlstm.serve.app import Page, example_prompt, forecaster_html
from fastlstm.text.data.tokenizer import ByteTokenizer, CharTokenizer
from forecast_server import QUICK, save, waves
from odd_names import NAMES
from running_server import SETTINGS, Running

SHELLS = [path for name in ("sh", "bash") if (path := shutil.which(name))]
EVIL = "';touch pwned;$(touch pwned)`touch pwned`\\\nEND\ntouch pwned\n"


@pytest.mark.parametrize("name", ["page.html", "forecast.html", "forecaster.html", "locked.html"])
def test_a_page_works_below_a_path_of_a_proxy(name):
    """Behind nginx's `location /lstm/`, an address that begins with / leads elsewhere."""
    text = (files("fastlstm.serve") / name).read_text("utf-8")
    assert not re.findall(r"""(?:href=|src=|fetch\(|ask\()["'`]/""", text)


def example(page: str) -> str:
    """The command of a forecaster's page."""
    (shell,) = re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)
    return html.unescape(shell)


def run(command: list[str], text: str, folder: Path) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def odd_table(num_rows: int = 120) -> pa.Table:
    """Columns of every role whose names and values are meant to break out of what they stand in."""
    rng = np.random.default_rng(2)
    table, total = waves(num_rows), 3 * num_rows
    names = [name for name in NAMES if name.strip() and "\ud800" not in name]
    for name in names:
        table = table.append_column(name, pa.array(rng.normal(size=total).astype(np.float32)))
    for name in ("sky", "kind\n" + EVIL):
        values = np.array([EVIL, EVIL + "2"])[rng.integers(0, 2, total)]
        table = table.append_column(name, pa.array(values))
    return table


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    from fastlstm.forecast.window_forecaster import load_window_forecaster

    table = odd_table()
    names = table.column_names
    categorical = ["sky", "kind\n" + EVIL]
    roles: dict[str, Any] = {
        "target": ["y", names[-3]],
        "past": [*names[4:-3], "sky"],
        "future": ["kind\n" + EVIL],
        "categorical": categorical,
    }
    model = Forecaster(**{**QUICK, **roles}).fit(table)
    path = save(model, tmp_path_factory.mktemp("odd"))
    running = Running(load_window_forecaster(path), SETTINGS)
    yield running
    running.end()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("path", SHELLS)
def test_the_example_of_a_forecaster_is_answered(path, forecasts, tmp_path):
    shell = example(forecasts.client.get("/").text)
    table = tmp_path / "table.csv"
    csv.write_csv(waves().set_column(1, "ds", waves()["ds"].cast(pa.timestamp("s"))), table)
    header, *rows = run([path], shell, tmp_path).splitlines()
    assert header.replace('"', "") == "unique_id,ds,y"
    assert len(rows) == 3 * forecasts.runner.service.forecast_engine.model.horizon
    assert list(tmp_path.iterdir()) == [table], "nothing else ran"


def test_the_page_of_a_forecaster_says_what_it_forecasts(whole_forecasts):
    answer = whole_forecasts.client.get("/")
    assert answer.status_code == 200
    text = html.unescape(re.sub(r"<[^>]+>", " ", answer.text))
    for part in ("waves", "24 rows", "one every hour", "next 6 steps of y"):
        assert part in text, part
    for link in ("/v2/models/waves", "/openapi.json", "/metrics", "/health/ready"):
        assert f'<a href=".{link}">' in answer.text
        assert whole_forecasts.client.get(link).status_code == 200


def test_names_of_columns_are_text_on_the_page(odd):
    page = odd.client.get("/").text
    shell = example(page)
    assert "pwned" not in shell
    assert len(shell.splitlines()) == 1
    assert page.count("<script>") == 1
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    assert not set("\x1b\u202e\0") & set(page)
    assert "x" * 3000 not in page


@pytest.mark.parametrize("host", ["<script>alert(1)</script>", "a'b", "$(x)", "a b", ""])
def test_an_invalid_host_is_not_shown(host, forecasts):
    engine = forecasts.runner.service.forecast_engine
    page = html.unescape(forecaster_html(engine, host, None))
    assert page.count("curl -sS 'http://localhost/forecast'") == 1
    known = html.unescape(forecaster_html(engine, "[::1]:8000", None))
    assert known.count("curl -sS 'http://[::1]:8000/forecast'") == 1


def test_with_keys_the_page_shows_the_model_only_to_a_key(serve, plain_model):
    running = serve(model=plain_model, keys=("secret-key",))
    closed = running.client.get("/")
    assert closed.status_code == 200
    shown = closed.text.partition("<main>")[2].partition("</main>")[0]
    assert "temp" not in shown
    assert "waves" not in closed.text
    wrong = running.client.get("/", headers={"authorization": "Bearer other"})
    assert wrong.text == closed.text
    opened = running.client.get("/", headers={"authorization": "Bearer secret-key"})
    assert "waves" in opened.text
    assert "authorization: Bearer KEY" in html.unescape(opened.text)
    assert "secret-key" not in opened.text


@pytest.mark.parametrize("name", ["page.html", "forecast.html"])
def test_the_policy_allows_only_the_script_and_style_of_the_page(name):
    policy = Page(name).headers["content-security-policy"]
    assert "unsafe" not in policy
    assert re.search(
        r"default-src 'none'; script-src 'sha256-\S+='; style-src 'sha256-\S+=';", policy
    )


def test_pages_have_labels_and_no_scripts_or_styles_in_tags(server, whole_forecasts):
    for running in (server, whole_forecasts):
        page = running.client.get("/").text
        html = page.partition("<main>")[2].partition("<script>")[0]
        assert not re.search(r"\s(on\w+|style)\s*=", html)
        fields = re.findall(r"<(?:input|textarea|select)\b", html)
        labelled = re.findall(r"<label>(?:(?!</label>).)*<(?:input|textarea|select)\b", html, re.S)
        assert len(fields) == len(labelled) > 3
        assert 'role="status"' in html
        assert 'role="alert"' in html


def test_the_page_of_a_forecaster_names_the_columns_of_a_table(forecasts, whole_forecasts):
    plain, whole = (one.client.get("/").text for one in (forecasts, whole_forecasts))
    assert "A CSV with the columns y, temp, unique_id, and one of times" in plain
    assert 'id="future"' not in plain
    assert "A CSV with the columns y, temp, sky, price, kind, size, place, unique_id," in whole
    assert "The columns price, kind of every step ahead" in whole
    assert f'data-limit="{1 << 20}"' in whole
    url = re.search(r"curl -sS &#x27;(\S+)&#x27;|curl -sS '(\S+)'", plain)
    assert (url[1] or url[2]) == f"{forecasts.url}/forecast"


@pytest.mark.parametrize("name", ["page.html", "forecast.html"])
def test_no_other_page_can_frame_or_redirect_this_one(name):
    headers = Page(name).headers
    rules = [rule.strip() for rule in headers["content-security-policy"].split(";")]
    assert {"frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'"} <= set(rules)
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["vary"] == "authorization", "what a key opens is no answer to another request"


def test_one_step_is_called_one_step(forecasts, monkeypatch):
    engine = forecasts.runner.service.forecast_engine
    assert f"the next {engine.model.horizon} steps of y" in forecaster_html(engine, "", None)
    monkeypatch.setattr(engine.model, "horizon", 1)
    assert "and forecasts the next step of y" in forecaster_html(engine, "", None)


def test_the_page_of_a_text_model_has_a_valid_prompt(server):
    page = server.client.get("/").text
    found = re.findall(r"<textarea[^>]*>(.*?)</textarea>", page, re.DOTALL)
    (prompt,) = map(html.unescape, found)
    assert prompt == "the "
    assert server.text(prompt=prompt, max_tokens=3)


@pytest.mark.parametrize(
    ("letters", "prompt"),
    [("ACGT\n", "ACGT"), ("\n .,", ""), ("".join(map(chr, range(32, 127))), "Once upon a time")],
)
def test_an_example_prompt_is_in_the_vocabulary(letters, prompt):
    assert example_prompt(CharTokenizer("".join(sorted(letters)))) == prompt
    assert example_prompt(ByteTokenizer()) == "Once upon a time"
