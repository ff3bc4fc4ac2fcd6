"""The page at `/` in Chromium, if playwright is installed."""

import io
import pathlib
import shutil
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyarrow import csv

from forecast_server import h, waves

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")


def as_csv(table):
    sink = io.BytesIO()
    csv.write_csv(table.set_column(1, "ds", table["ds"].cast(pa.timestamp("s"))), sink)
    return sink.getvalue()


pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")


@pytest.fixture
def open_page():
    """Returns what opens a page of a server; no script fails, nothing comes from elsewhere."""
    told, asked = [], []
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])

        def opened(server, width=1100):
            page = browser.new_page(viewport={"width": width, "height": 800})
            page.on("pageerror", lambda error: told.append(str(error)))
            page.on("console", lambda message: told.append(message.text))
            page.on("request", lambda request: asked.append(server.url in request.url))
            page.goto(server.url + "/")
            return page

        yield SimpleNamespace(of=opened, told=told)
        assert all(asked), "nothing from elsewhere"
        browser.close()


@pytest.mark.parametrize("width", [390, 1100])
def test_the_page_writes_refuses_and_stops(open_page, server, width):
    page = open_page.of(server, width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator("#prompt").fill("ab")
    page.locator("#length").fill("50")
    page.locator("#start").click()
    page.get_by_text("tokens/s").wait_for(timeout=10_000)
    page.locator("#stop:disabled").wait_for(timeout=10_000)
    assert "100 tokens" in page.inner_text("body"), "two samples of fifty"
    assert open_page.told == []
    first = page.inner_text("#samples")
    page.locator("#seed").fill(page.inner_text("#rate").split("seed ")[1])
    page.locator("#start").click()
    page.locator("#stop:disabled").wait_for(timeout=10_000)
    assert page.inner_text("#samples") == first, "the same seed, the same texts"
    page.locator("#prompt").fill("\u2603 is not in this vocabulary")
    page.locator("#start").click()
    page.get_by_text("the prompt has").wait_for(timeout=10_000)


def test_typed_text_is_in_the_colour_of_text(open_page, server):
    page = open_page.of(server)
    ink = page.evaluate("getComputedStyle(document.body).color")
    for field in ("prompt", "length", "key", "count"):
        found = page.evaluate(f"getComputedStyle(document.getElementById('{field}')).color")
        assert found == ink, field
    assert page.evaluate("document.activeElement.id") == "prompt"
    selected = page.evaluate("document.getSelection().toString()")
    assert selected == page.locator("#prompt").input_value() == "the ", "typing replaces it"


@pytest.mark.parametrize("width", [390, 1100])
def test_a_dropped_table_is_forecast_and_downloaded(open_page, forecasts, width):
    page = open_page.of(forecasts, width)
    drop = """(text) => {
        const data = new DataTransfer();
        data.items.add(new File([text], "waves.csv"));
        const event = new DragEvent("drop", { dataTransfer: data, bubbles: true });
        document.getElementById("drop").dispatchEvent(event);
    }"""
    page.evaluate(drop, as_csv(waves()).decode())
    page.locator("#charts figure").nth(2).wait_for(timeout=30_000)
    assert page.inner_text("#status") == f"forecast 3 series, {h} steps each"
    assert page.locator("#charts .band").count() >= 3
    page.get_by_role("checkbox", name="s1").uncheck()
    assert page.locator("#charts figcaption").all_inner_texts() == ["s0: y", "s2: y"]
    page.locator("#levels").evaluate("(field) => { field.value = ''; }")
    with page.expect_download() as download:
        page.locator("#download").click()
    written = pathlib.Path(download.value.path()).read_bytes()
    own = forecasts.client.post(
        "/forecast",
        content=as_csv(waves()),
        headers={"content-type": "text/csv", "accept": "text/csv"},
    )
    assert written == own.content
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert open_page.told == []
    page.locator("#text").fill(as_csv(waves()).decode().replace(",", ";").replace(".", ","))
    page.locator("#start").click()
    page.get_by_role("button", name="Read it with decimal=,").click()
    page.get_by_text("forecast 3 series").wait_for(timeout=30_000)


@pytest.mark.parametrize("width", [390, 1100])
def test_a_forecasters_page_opens_with_a_key(open_page, serve, plain_model, width):
    server = serve(model=plain_model, keys=("secret-key",))
    page = open_page.of(server, width)
    page.locator("#key").fill("wrong")
    page.get_by_role("button").click()
    page.get_by_text("does not know this key").wait_for(timeout=10_000)
    page.locator("#key").fill("secret-key")
    page.get_by_role("button").click()
    page.get_by_text("The same with curl").wait_for(timeout=10_000)
    assert "waves" in page.inner_text("h1")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert open_page.told == []
