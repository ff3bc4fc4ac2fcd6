"""The README's Python runs as printed, with a shorter budget; its commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fastlstm.cli.main import VERBS, main


def blocks(repository: Path, language: str) -> list[str]:
    text = (repository / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.charts
def test_python_blocks_run(repository, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = blocks(repository, "python")
    assert found
    for code in found:
        exec(compile(code.replace('budget="20s"', "steps=3"), "README.md", "exec"), {})
    report = tmp_path / "runs" / "docs" / "report.html"
    assert "could not be drawn" not in report.read_text(encoding="utf-8")
    lines = capsys.readouterr().out.splitlines()
    assert any(re.fullmatch(r"\d+\.\d+", line) and float(line) > 0 for line in lines)


def test_command_lines_run(repository, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("Well, Prince, so Genoa and Lucca are now just estates.\n" * 99)
    Path("other.txt").write_text("Другой текст: another text, with other characters.\n" * 9)
    lines = "\n".join(blocks(repository, "sh")).splitlines()
    lines = [line for line in lines if line.startswith("fastlstm ")]
    assert len(lines) == 5
    for line in lines:
        argv = shlex.split(line.replace("--budget 5m", "--steps 3 --preset tiny"), comments=True)
        assert main(argv[1:]) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "unknown" in shown
    assert "checked in" in shown


def test_commands_exist(repository):
    lines = "\n".join(blocks(repository, "sh")).splitlines()
    verbs = [line.split()[1] for line in lines if line.startswith("fastlstm ")]
    assert len(verbs) >= 3
    assert set(verbs) <= set(VERBS)
    makefile = (repository / "Makefile").read_text(encoding="utf-8")
    targets = [line.split()[1] for line in lines if line.startswith("make ")]
    assert targets == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)
