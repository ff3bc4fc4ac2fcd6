"""Hooks of MkDocs: pages of notebooks and of files outside docs/, the gallery, a check of links.

A page links to `../examples/callbacks.py`, as a code host needs it; on the site that link leads to
a page with the file.
"""

from __future__ import annotations

import json
import logging
import posixpath
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mkdocs.structure.files import File

DOCS = Path(__file__).resolve().parent
REPOSITORY = DOCS.parent
GALLERY = REPOSITORY / "build" / "gallery"
_CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_PICTURE = re.compile(r"<!-- picture: ([\w-]+) -->")
_LANGUAGES = {".py": "python", ".sh": "sh", ".yaml": "yaml"}
_BOOSTS = {
    "faq.md": 2.0, "start": 1.5, "howto": 1.5, "concepts": 1.5,
    "cli.md": 0.5, "kernels.md": 0.5,
    "architecture.md": 0.2, "releasing.md": 0.2, "files.md": 0.1,
}  # fmt: skip
"""Factors of pages and folders in the search: an answer comes before the inside of the source."""
_LOG = logging.getLogger("mkdocs.hooks.site_pages")


def on_files(files: Any, config: Any) -> None:
    """Adds the pages of notebooks, of the files outside docs/ that a page links to, and of runs."""
    for path in DOCS.rglob("*.ipynb"):
        name = path.relative_to(DOCS).with_suffix(".md").as_posix()
        files.append(File.generated(config, name, content=_notebook(path)))
    waiting = [(page.src_uri, page.content_string) for page in files.documentation_pages()]
    while waiting:
        page, text = waiting.pop()
        for target in sorted(set(map(_page_of, _targets(text, page)))):
            path = REPOSITORY / target.removeprefix("source/").removesuffix(".md")
            is_new = target.startswith("source/") and files.get_file_from_path(target) is None
            if is_new and path.exists():  # else MkDocs warns of the link
                content = _content(path)
                files.append(File.generated(config, target, content=content))
                waiting.append((target, content))
    if not GALLERY.exists():
        subprocess.run([sys.executable, DOCS / "gallery.py"], check=True)
    for path in GALLERY.glob("*-page.html"):
        files.append(File.generated(config, f"gallery/{path.name}", abs_src_path=str(path)))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Leads links to the site's pages, shows the pictures of the gallery, ranks the search."""
    own = page.file.src_uri
    page.meta.setdefault("search", {"boost": _BOOSTS.get(own.split("/")[0], 1.0)})
    start = posixpath.dirname(own)

    def moved(match: re.Match[str]) -> str:
        target = posixpath.relpath(_page_of(_target(match[1], own)), start or ".")
        return f"]({target}{match[2] or ''})"

    parts = _CODE.split(markdown)
    parts[::2] = [_LINK.sub(moved, part) for part in parts[::2]]
    return _PICTURE.sub(lambda match: (GALLERY / f"{match[1]}.html").read_text(), "".join(parts))


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Gives the search a name for screen readers, which the theme leaves out."""
    return output.replace(' role="dialog">', ' role="dialog" aria-label="Search">', 1)


def _targets(text: str, page: str) -> list[str]:
    """Returns the paths in the repository that a page links to."""
    return [
        _target(link, page) for part in _CODE.split(text)[::2] for link, _ in _LINK.findall(part)
    ]


def _target(link: str, page: str) -> str:
    """Returns the path in the repository of a link on a page of the site."""
    is_outside = page.startswith("source/")
    place = page.removeprefix("source/").removesuffix(".md") if is_outside else f"docs/{page}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(place), link))


def _page_of(target: str) -> str:
    """Returns the page or file of the site that shows a path of the repository."""
    is_page = target.startswith("docs/") and not target.endswith(".py")
    if not is_page or (REPOSITORY / target).is_dir():
        return f"source/{target}.md"
    return re.sub(r"\.ipynb$", ".md", target.removeprefix("docs/"))


def _notebook(path: Path) -> str:
    """Returns a notebook as a page: texts, code, and of each output the best that it stores."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", [])})
            if "text/html" in data:
                parts.append(
                    f'<div class="output" tabindex="0">\n{"".join(data["text/html"])}\n</div>'
                )
            elif "image/png" in data:
                parts.append(
                    f'<img alt="output" src="data:image/png;base64,{data["image/png"].strip()}">'
                )
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def _content(path: Path) -> str:
    """Returns the page of a file or directory outside docs/."""
    if path.is_dir():
        names = sorted(p.name for p in path.iterdir() if not p.name.startswith(("_", ".")))
        body = "".join(f"- [{name}]({path.name}/{name})\n" for name in names)
    elif path.suffix == ".md":
        body = path.read_text(encoding="utf-8")
    else:
        text = path.read_text(encoding="utf-8")
        body = f"```{_LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n```\n"
    title = "" if path.suffix == ".md" else f"# {path.relative_to(REPOSITORY)}\n\n"
    return f"---\nsearch:\n  exclude: true\n---\n\n{title}{body}"


class _Page(HTMLParser):
    """The ids of a page, its links, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.links, self.loads = set[str](), set[str](), set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if "src" in given or (tag == "link" and "href" in given):
            self.loads.add(given.get("src") or given["href"])
        elif tag == "a" and "href" in given:
            self.links.add(given["href"])


def on_post_build(config: Any) -> None:
    """Warns of a link without a page or anchor, and of a page that loads from the network."""
    site = Path(config.site_dir).resolve()
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    pages.pop(site / "404.html", None)  # a server shows it at any address
    for path, page in pages.items():
        name = path.relative_to(site)
        for url in sorted(page.links | page.loads):
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                if url in page.loads and parts.scheme != "data":
                    _LOG.warning("%s loads %s", name, url)
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                _LOG.warning("%s links to %s, which does not exist", name, url)
            elif parts.fragment and unquote(parts.fragment) not in pages[target].ids:
                _LOG.warning("%s links to %s, which has no such anchor", name, url)
