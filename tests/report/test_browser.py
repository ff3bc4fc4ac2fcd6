"""report.html in a real browser, where there is one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastlstm.report.page import write_report
from odd_names import NAMES, forecast_event
from recorded_run import add_event

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as p:
        found = p.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield found
        found.close()


def opened(browser: Any, path: Path, width: int = 1100) -> tuple[Any, list[str], list[str]]:
    """Opens a file; returns the page, the scripts that ran and what was loaded."""
    page = browser.new_page(viewport={"width": width, "height": 800})
    ran: list[str] = []
    loaded: list[str] = []
    page.on("dialog", lambda dialog: (ran.append(dialog.message), dialog.dismiss()))
    page.on("requestfinished", lambda request: loaded.append(request.url))
    page.goto(path.as_uri())
    return page, ran, loaded


@pytest.mark.parametrize("width", [390, 1100])
def test_names_run_nothing_and_push_nothing_aside(browser: Any, run_dir: Path, width: int) -> None:
    for name in NAMES:
        add_event(run_dir, **forecast_event(name, series=name))
        add_event(run_dir, event="sample", step=1, text=name)
    path = write_report(run_dir)
    page, ran, loaded = opened(browser, path, width)
    assert ran == []
    assert loaded == [path.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_policy_holds_without_escaping(browser: Any, run_dir: Path) -> None:
    path = write_report(run_dir)
    attack = "<script>alert(1)</script><img src='x.png' onerror='alert(2)'>"
    path.write_text(path.read_text().replace("</main>", f"{attack}</main>"))
    _, ran, loaded = opened(browser, path)
    assert ran == []
    assert loaded == [path.as_uri()]


def test_the_best_row_and_the_names_of_rows_stay_in_sight(browser: Any, run_dir: Path) -> None:
    """Sixty evaluations of which the thirtieth is the best, on a narrow screen."""
    evals = [
        {"event": "eval", "split": "valid", "step": n, "bits_per_char": 2 + abs(n - 30) / 9,
         "perplexity": 3.2, "bits_per_byte": 2.0, "loss": 1.2, "elapsed_s": 3.0 * n}
        for n in range(60)
    ]  # fmt: skip
    test = {"event": "test", "scores": {"forecaster": dict.fromkeys(("mse", "mae", "rmse"), 1.0)}}
    lines = [json.dumps(event) + "\n" for event in [{"event": "start"}, *evals, test]]
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    page, _, _ = opened(browser, write_report(run_dir), 390)
    place = """(selector, scroll) => {
        const box = [...document.querySelectorAll('.scroll')].at(-1);
        box.scrollTop = scroll;
        const row = document.querySelector(selector).getBoundingClientRect();
        const frame = box.getBoundingClientRect();
        return [row.top - frame.top, frame.bottom - row.bottom];
    }"""
    for scroll in (0, 900, 10_000):
        above, below = page.evaluate(f"({place})('.scroll:last-of-type tr.best td', {scroll})")
        assert above >= 0, scroll
        assert below >= -1, scroll
    name = page.get_by_text("forecaster", exact=True).bounding_box()
    assert name["height"] < 50, "in one line"
