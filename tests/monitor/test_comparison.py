from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastlstm.cli.main import main
from fastlstm.errors import ConfigError, RunDirectoryError
from fastlstm.monitor.comparison import compare_runs
from recorded_run import add_event


def test_quality_at_equal_seconds_and_at_equal_chars(write_run: Any) -> None:
    result = compare_runs([write_run("a"), write_run("slow", best=1.9, seconds=20.0)])
    assert result.at == {"seconds": 100.0, "chars": 10_000.0}
    by = {k: [result.figure(run, k) for run in result.runs] for k in ("seconds", "chars")}
    assert by["seconds"] == pytest.approx([2.0, 2.4])
    assert by["chars"] == pytest.approx([2.0, 1.9])
    assert (result.differences, result.notes) == ({}, [])


def change(run: Path, changed: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Changes the events of a run."""
    path = run / "metrics.jsonl"
    events = (changed(json.loads(line)) for line in path.read_text("utf-8").splitlines())
    path.write_text("".join(json.dumps(event) + "\n" for event in events), "utf-8")


def test_different_settings_kernels_and_machines_are_listed(write_run: Any) -> None:
    other = write_run("b", kernels=["x"], batch_size=64, ceiling_gflops=90.0, model={"rnn_size": 5})
    result = compare_runs([write_run("a"), other])
    assert result.differences["batch_size"] == [32, 64]
    assert result.differences["model.rnn_size"] == [512, 5]
    assert result.differences["kernels"][1] == "x"
    assert any("different machines" in note for note in result.notes)


def test_another_number_of_threads_is_no_other_machine(write_run: Any) -> None:
    one = write_run("a", threads=1, ceiling_gflops=150.0)
    two = write_run("b", threads=2, ceiling_gflops=300.0)
    assert compare_runs([one, two]).notes == []


def test_notes_name_other_data_tasks_and_unfinished_runs(write_run: Any) -> None:
    other = write_run("b", source="c.txt", task="forecast", is_ended=False)
    text = " ".join(compare_runs([write_run("a"), other]).notes)
    assert "different sources" in text
    assert "different tasks" in text
    assert "b is dead" in text


def test_runs_of_different_tasks_differ_in_common_settings(write_run: Any) -> None:
    one = write_run("a", time=1.5, seq_length=128, seed=1)
    two = write_run("b", time=2.5, task="forecast", horizon=24, seed=2)
    found = compare_runs([one, two]).differences
    assert found["seed"] == [1, 2]
    assert not {"time", "horizon"} & set(found)
    assert "horizon" in compare_runs([write_run("c"), write_run("d", horizon=24)]).differences


def test_a_note_names_a_share_above_the_ceiling(write_run: Any) -> None:
    run = write_run("b")
    change(run, lambda e: {**e, "ceiling_share": 1.55} if "progress" in e else e)
    [note] = compare_runs([write_run("a"), run]).notes
    assert "155 % of its ceiling" in note


def test_bad_input(write_run: Any, tmp_path: Path) -> None:
    good = write_run("a")
    with pytest.raises(ConfigError, match="two runs or more"):
        compare_runs([good])
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "metrics.jsonl").write_bytes(b'\x00{"loss": 1}\n{"event": "st')
    for bad in (tmp_path / "none", tmp_path / "foreign", good / "metrics.jsonl"):
        with pytest.raises(RunDirectoryError, match="no training is recorded there"):
            compare_runs([good, bad])


def test_the_command(write_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = str(write_run("a")), str(write_run("b\x1b[31m", best=1.5, batch_size=64))
    assert main(["compare", one, two]) == 0
    shown = capsys.readouterr().out
    assert "at 1:40" in shown
    assert "batch_size" in shown
    assert "1.5000" in shown
    assert "\x1b" not in shown
    assert main(["compare", one, two, "--at", "chars", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [run["at_equal_chars"] for run in facts["runs"]] == pytest.approx([2.0, 1.5])
    assert main(["compare", one]) == 2


def test_a_comparison_as_one_offline_file(write_run: Any, tmp_path: Path) -> None:
    evil = "<img src=x>"
    paths = [write_run("x/a"), write_run("y/a", best=1.5, batch_size=64, source=evil)]
    out = tmp_path / "page.html"
    assert main(["compare", *map(str, paths), "--html", str(out)]) == 0
    html = out.read_text("utf-8")
    assert "different sources" in html
    assert "1.5000" in html
    assert html.count("<polyline") == 4
    assert "<td>batch_size</td>" in html
    assert str(paths[1]) in html  # two have one name
    assert "<script" not in html
    assert "<img" not in html
    assert main(["compare", *map(str, paths), "--html", str(tmp_path / "none" / "x.html")]) == 1


def test_a_running_run_of_tokens_is_compared_by_its_characters(
    write_run: Any, tmp_path: Path
) -> None:
    """A token of several characters counted as one until the run had ended."""
    runs = [write_run(name, vocab="bpe", is_ended=False) for name in "ab"]
    for run, tokens in zip(runs, (0.25, 0.5), strict=True):  # per character
        nats = math.log(2.0) / tokens
        change(run, lambda e, nats=nats: {**e, "loss": e.get("bits_per_char", 0.0) * nats})
    result = compare_runs(runs)
    assert result.at["chars"] == pytest.approx(20_000)
    by_chars = [result.figure(run, "chars") for run in result.runs]
    assert by_chars == pytest.approx([2.5, 2.0])


def test_characters_that_are_not_known_are_not_guessed(write_run: Any) -> None:
    run = write_run("a", vocab="bpe", is_ended=False)
    change(run, lambda e: {name: value for name, value in e.items() if name != "loss"})
    assert compare_runs([run, write_run("b")]).at["chars"] is None


def test_notes_name_two_machines_and_other_load(write_run: Any) -> None:
    one, two = write_run("a", machine="CPU X"), write_run("b", machine="CPU Y")
    event = {"event": "machine", "elapsed_s": 10.0, "cores": 2, "own_cores": 1.0}
    for share in (0.3, 0.5):
        add_event(two, **event, others_share=share)
    result = compare_runs([one, two])
    first, second = result.notes
    assert "different machines" in first
    assert "b was trained beside other processes, which used 40% of the machine" in second
    assert compare_runs([one, write_run("old")]).notes == []
    assert [run["others_share"] for run in result.to_dict()["runs"]] == [None, pytest.approx(0.4)]
