from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fastlstm.cli import train as train_verb
from fastlstm.cli.main import main
from fastlstm.cli.train import observed
from fastlstm.errors import NonFiniteError, Stopped
from fastlstm.text.config import TrainConfig
from fastlstm.training.outputs import EventHub


def replace_train(monkeypatch: pytest.MonkeyPatch, train: Any) -> None:
    module = ModuleType("fastlstm.text.train")
    module.train = train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastlstm.text.train", module)


@pytest.fixture
def trained(monkeypatch, events, tmp_path):
    """Replaces `train` by one that notes its arguments and sends made-up events."""
    calls: list[dict[str, Any]] = []
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):
        Path(name).write_text("a text")

    def train(source: Any, **arguments: Any) -> None:
        calls.append({"source": source, **arguments})
        for event in events:
            for observer in arguments["observers"]:
                observer(event)

    replace_train(monkeypatch, train)
    return calls


def test_flags_become_a_configuration(trained, capsys):
    assert main(["train", "a.txt", "--out", "r", "--rnn_size=64", "--budget", "90"]) == 0
    (call,) = trained
    assert call["source"] == "a.txt"
    assert call["out"] == "r"
    assert call["resume"] is False
    assert call["config"] == TrainConfig(rnn_size=64, budget="90")
    assert "evaluation: step 123,456,789, validation, 1.7123" in capsys.readouterr().out


def test_many_sources_and_resume(trained):
    assert main(["train", "a.txt", "b.txt", "--out", "r", "--resume"]) == 0
    assert trained[0]["source"] == ["a.txt", "b.txt"]
    assert trained[0]["resume"] is True


def test_with_json_nothing_else_is_printed(trained, capsys, events):
    assert main(["train", "a.txt", "--out", "r", "--json"]) == 0
    out, err = capsys.readouterr()
    kinds = [json.loads(line)["event"] for line in out.splitlines()]
    assert kinds == [event["event"] for event in events]
    assert err == ""


def test_flags_win_over_the_file(trained, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("rnn_size: 64\nseed: 3\nsteps: 10\n")
    arguments = ["train", "--config", str(path), "a.txt", "--out", "r"]
    assert main([*arguments, "--seed", "4", "--budget", "5m"]) == 0
    assert trained[0]["config"] == TrainConfig(rnn_size=64, seed=4, budget="5m")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "5", "--budget", "1m"], "`--steps` and `--budget` exclude each other"),
        (["--rnn-size", "0"], "`--rnn-size` is 0, expected a number from 1 to 65536"),
        (["--budget", "soon"], "`--budget` is 'soon', expected a duration such as 90s, 5m"),
        (["--split", "50/20"], "`--split` is '50/20', expected train/validation/test in percent"),
        (["--config", "missing.yaml"], "--config missing.yaml: no such file or directory"),
    ],
)
def test_bad_settings_are_one_line_and_exit_code_2(trained, refused, arguments, message):
    assert message in refused("train", "a.txt", "--out", "r", *arguments)
    assert trained == []


def test_the_live_line_is_cleared_before_an_error(monkeypatch, terminal, events, tmp_path):
    def train(source: Any, **arguments: Any) -> None:
        arguments["observers"][0](next(event for event in events if event["event"] == "step"))
        raise NonFiniteError("NaN in step 5")

    replace_train(monkeypatch, train)
    monkeypatch.setattr(sys, "stdout", terminal)
    (tmp_path / "a.txt").write_text("a text")
    assert main(["train", str(tmp_path / "a.txt"), "--out", "r"]) == 1
    assert terminal.getvalue().endswith("\r\x1b[2K")


@pytest.mark.parametrize(
    ("flags", "is_one", "told"), [([], True, 0), ([], False, 1), (["--json"], True, 1)]
)
def test_a_stop_is_reported_once(monkeypatch, capsys, tmp_path, flags, is_one, told):
    def train(source: Any, **arguments: Any) -> None:
        arguments["observers"][0]({"event": "end", "reason": "stopped by SIGINT"})
        raise Stopped("stopped by SIGINT; checkpoint-5 is saved")

    replace_train(monkeypatch, train)
    monkeypatch.setattr("fastlstm.cli.train._is_one_stream", lambda: is_one)
    (tmp_path / "a.txt").write_text("a text")
    assert main(["train", str(tmp_path / "a.txt"), "--out", "r", *flags]) == 75
    out, err = capsys.readouterr()
    assert "stopped by SIGINT" in out
    assert err.count("stopped by SIGINT") == told


def test_all_outputs_of_a_command_name_flags():
    events: list[dict[str, Any]] = []
    hub = EventHub(None, [events.append])
    with observed(True):
        hub.say("info", "filled; `gaps='split'` cuts there")
    hub.say("info", "filled; `gaps='split'` cuts there")
    assert [event["text"].split("`")[1] for event in events] == ["--gaps split", "gaps='split'"]


def test_one_output_stream_is_told_from_two(monkeypatch, tmp_path):
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        for stderr, is_one in ((out, True), (err, False)):
            monkeypatch.setattr(sys, "stdout", out)
            monkeypatch.setattr(sys, "stderr", stderr)
            assert train_verb._is_one_stream() is is_one


def test_the_budget_counts_from_the_start_of_the_command(trained):
    before = time.perf_counter()
    assert main(["train", "a.txt", "--out", "r"]) == 0
    assert before <= trained[0]["began"] <= time.perf_counter()


def test_options_of_a_file_count_as_given(trained, tmp_path):
    """A resumed run is compared with it."""
    (tmp_path / "c.yaml").write_text("rnn_size: 64\n")
    assert main(["train", "a.txt", "--out", "r", "--config", "c.yaml", "--steps", "9"]) == 0
    assert trained[0]["given"] == {"rnn_size", "steps"}
