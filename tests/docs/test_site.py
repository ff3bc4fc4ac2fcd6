"""The site: its pages are in the navigation, links and anchors resolve, the build is strict."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import pytest
import yaml

import fastlstm

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s:#]*)(?:#([^)\s]+))?\)")


def leaves(nav):
    if isinstance(nav, str):
        return [nav]
    return [
        leaf for part in (nav.values() if isinstance(nav, dict) else nav) for leaf in leaves(part)
    ]


def anchors(path):
    """Returns the anchors of a page's headings that the site and code hosts give alike."""
    text = BLOCK.sub("", path.read_text(encoding="utf-8"))
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", heading).strip().lower()
        site, host = re.sub(r"[-\s]+", "-", plain), re.sub(r"\s", "-", plain)
        if site == host:
            found.add(site)
    return found


def test_the_navigation_has_every_page_once():
    site = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
    notebooks = [path.relative_to(DOCS).with_suffix(".md") for path in DOCS.rglob("*.ipynb")]
    assert sorted(leaves(site["nav"])) == sorted([*PAGES, *(path.as_posix() for path in notebooks)])


@pytest.mark.parametrize("page", PAGES)
def test_links_and_anchors_of_a_page_resolve(page):
    text = CODE.sub("", (DOCS / page).read_text(encoding="utf-8"))
    for link, anchor in LINK.findall(text):
        path = (DOCS / page).parent / link if link else DOCS / page
        assert path.exists(), link
        if anchor:
            assert anchor in anchors(path), f"{link}#{anchor}"


def test_no_two_brackets_stand_side_by_side():
    """The site takes `[a][b]` for a link, and a link without a target ends its build."""
    logs = sorted((REPOSITORY / "benchmarks" / "log").glob("*.md"))
    for path in [*map(DOCS.joinpath, PAGES), *logs]:
        text = CODE.sub("", path.read_text(encoding="utf-8"))
        assert re.findall(r"\[[^]\n]*\]\[[^]\n]*\]", text) == [], path.name


def test_the_reference_has_every_public_name_once():
    named = [
        name
        for page in (DOCS / "reference").glob("*.md")
        for name in re.findall(
            r"^::: fastlstm\.(\w+|keras\.\w+|ray\.\w+)$", page.read_text(encoding="utf-8"), re.M
        )
    ]
    errors = {name for name in fastlstm.__all__ if name in vars(fastlstm.errors)}
    public = set(fastlstm.__all__) - errors - {"__version__"}
    modules = {"keras", "errors", "keras.LSTM", "keras.accelerate", "keras.restore", "ray.train"}
    assert sorted(named) == sorted(public | modules)


def of_docs(name):
    """Returns a module of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_are_checked_behind_a_symbolic_link(tmp_path, caplog):
    pytest.importorskip("mkdocs")
    site = tmp_path / "disk"
    site.mkdir()
    (tmp_path / "build").symlink_to(site)
    (site / "a.html").write_text('<a href="b.html#x"></a><a href="b.html#y"></a>')
    (site / "b.html").write_text('<p id="x">')
    config = SimpleNamespace(site_dir=str(tmp_path / "build"))
    of_docs("site_pages").on_post_build(config)
    assert [record.message for record in caplog.records] == [
        "a.html links to b.html#y, which has no such anchor"
    ]


def test_an_interrupted_gallery_is_no_gallery(tmp_path, monkeypatch):
    gallery = of_docs("gallery")
    assert gallery.OUT == REPOSITORY / "build/gallery"
    monkeypatch.setattr(gallery, "OUT", tmp_path / "build/gallery")
    monkeypatch.setattr(gallery, "_NEW", tmp_path / "build/gallery.new")
    monkeypatch.setattr(gallery, "_text", lambda _: gallery._write("text", "a chart\n"))
    monkeypatch.setattr(gallery, "_pages", lambda _: None)

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(gallery, "_forecasts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gallery.make()
    assert not gallery.OUT.exists()
    monkeypatch.setattr(gallery, "_forecasts", lambda _: None)
    for _ in range(2):
        gallery.make()
        assert {path.name for path in gallery.OUT.iterdir()} == {"text.html", "kernels.html"}
    assert [path.name for path in gallery.OUT.parent.iterdir()] == ["gallery"]


with_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None,
    reason="mkdocs, of the extra `docs`, is not installed",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Returns the folder of the site, and the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    return folder, subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip


@pytest.mark.slow
@with_mkdocs
def test_the_site_builds_without_a_warning(built):
    folder, done = built
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert (folder / "reference" / "lm.html").exists()


ASKED = {
    "LSTM slow CPU pytorch": "faq", "loss is exploding": "faq", "same sentence repeats": "faq",
    "generated text makes no sense": "faq", "reset LSTM state": "concepts/state",
    "many to many": "concepts/outputs", "difference hidden output": "concepts/outputs",
    "masking not supported": "faq", "predictions lagging behind": "faq",
    "predict next n steps": "faq", "inverse_transform scaled predictions": "faq",
    "validation loss not decreasing": "faq", "convert LSTM tflite": "howto/export",
    "seq_length batch_size": "howto/size", "LayerNorm LSTM": "howto/cell-option",
    "resume training checkpoint": "howto/resume", "reproducible results": "faq",
    "DataParallel LSTM": "faq", "run model android": "howto/export",
    "Forecaster.predict": "reference/forecaster",
}  # fmt: skip
"""Words that people typed for a problem in public threads, and the page with the answer."""


@pytest.mark.slow
@with_mkdocs
def test_the_search_lists_the_answer_among_the_first_five(built):
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        pytest.skip("needs Chromium")
    start = (built[0] / "index.html").as_uri()
    missed = {}
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page()
        for words, answer in ASKED.items():
            page.goto(f"{start}?q={quote(words)}")
            page.wait_for_selector(".md-search-result__item", state="attached")
            found = page.eval_on_selector_all(
                ".md-search-result__item",
                "items => items.slice(0, 5).map(item => item.querySelector('a').pathname)",
            )
            if not any(path.endswith(f"/{answer}.html") for path in found):
                missed[words] = found
        browser.close()
    assert missed == {}
