"""The short examples run as printed, with fewer steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest


def test_a_callback_prunes(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("Well, Prince, so Genoa and Lucca are now just estates.\n" * 99)
    monkeypatch.setattr(sys, "argv", ["callback.py", "book.txt"])
    code = (repository / "examples" / "callback.py").read_text(encoding="utf-8")
    exec(compile(code.replace('budget="60s"', "steps=20"), "callback.py", "exec"), {})
    lines = Path("runs/pruned/metrics.jsonl").read_text().splitlines()
    zeros = [event["zeros"] for line in lines if (event := json.loads(line))["event"] == "eval"]
    assert zeros[-1] == pytest.approx(0.75, abs=0.01)
    shown = capsys.readouterr().out
    assert "zeros 0.75" in shown
    assert "75% zeros" in shown
    assert "<th>zeros</th>" in Path("runs/pruned/report.html").read_text()
