"""Every block of Python and of the shell in README and docs/ runs, with short trainings.

The blocks of a page share one namespace and a folder, which has book.txt and other.txt. A block
that cannot run here has `<!-- not run: REASON -->` on the line before.
"""

from __future__ import annotations

import gc
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fastlstm.cli.main import main

REPOSITORY = Path(__file__).parents[2]
FENCE = re.compile(
    r"^(?: *<!-- not run: (?P<why>.+) -->\n)?(?P<space> *)```(?P<language>python|sh|bash|console)\n"
    r"(?P<code>.*?)^(?P=space)```",
    re.DOTALL | re.MULTILINE,
)
NOT_RUN_HERE = ("pip", "make", "apt-get", "source", ".")
"""Commands that prepare a machine."""


class Block(NamedTuple):
    """A block of a page; `line` is the first line of its code."""

    language: str
    code: str
    line: int
    why_not: str | None


def blocks(text):
    return [
        Block(
            match["language"],
            textwrap.dedent(match["code"]),
            text.count("\n", 0, match.start("code")) + 1,
            match["why"],
        )
        for match in FENCE.finditer(text)
    ]


PAGES = {
    path.relative_to(REPOSITORY).as_posix(): found
    for path in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md")))
    if (found := blocks(path.read_text(encoding="utf-8")))
}


def commands(block):
    """Returns the command lines of a block; those of `console` follow a `$ `."""
    lines = block.code.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    return [shorter(line) for line in lines if line.strip() and not line.startswith("#")]


def shorter(line):
    """Returns a command with three steps in place of a budget."""
    size = "" if "--horizon" in line else " --preset tiny"
    return re.sub(r"--budget \w+", f"--steps 3{size}", line)


def run_line(line, monkeypatch):
    """Runs a command line: `fastlstm` alone in this process, all else in a shell."""
    words = shlex.split(line, comments=True)
    if words[0] in NOT_RUN_HERE:
        return
    if words[0] == "export":
        for word in words[1:]:
            monkeypatch.setenv(*word.split("=", 1))
    elif words[0] == "fastlstm" and not set(words) & {"|", ">", "<", "&&", ";"}:
        assert main(words[1:]) == 0, line
    else:
        subprocess.run(["sh", "-ec", line], check=True, timeout=60)


@pytest.mark.charts
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # files left open
@pytest.mark.filterwarnings("ignore::UserWarning")  # such as intervals after three steps
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras' own
@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    Path("book.txt").write_text("Well, Prince, so Genoa and Lucca are now just estates.\n" * 99)
    Path("other.txt").write_text("Другой текст: another text, with other characters.\n" * 9)
    names: dict[str, Any] = {"__name__": "page"}
    for block in PAGES[page]:
        if block.why_not:
            continue
        if block.language == "python":
            code = re.sub(r'\bbudget="\w+"', "steps=3", block.code)
            exec(compile("\n" * (block.line - 1) + code, page, "exec"), names)
            continue
        for line in commands(block):
            run_line(line, monkeypatch)
    names.clear()
    gc.collect()  # what a page leaves open fails here, and no later test
    for report in tmp_path.rglob("report.html"):
        assert "could not be drawn" not in report.read_text(encoding="utf-8")


def test_the_readme_begins_with_two_commands_of_the_makefile():
    first = PAGES["README.md"][0]
    targets = [line.split()[1] for line in commands(first)]
    assert targets == ["demo", "test"]
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)


def test_a_page_is_read_block_by_block():
    text = (
        "# A\n```python\nx = 1\n```\n- item\n\n  ```console\n  $ fastlstm info \\\n      --json\n"
        "  out\n  ```\n<!-- not run: needs a server -->\n```sh\ncurl x\n```\n```text\nno\n```\n"
    )
    python, console, shell = blocks(text)
    assert python == ("python", "x = 1\n", 3, None)
    assert commands(console) == ["fastlstm info      --json"]
    assert (shell.why_not, console.why_not) == ("needs a server", None)


def test_a_command_that_fails_is_seen(monkeypatch):
    for line in ("fastlstm info nowhere", "false", "fastlstm info nowhere | cat && false"):
        with pytest.raises((AssertionError, subprocess.CalledProcessError)):
            run_line(line, monkeypatch)
    run_line("export ANSWER=42", monkeypatch)
    run_line('test "$ANSWER" = 42', monkeypatch)
