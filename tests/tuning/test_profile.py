import math
import time
from pathlib import Path

import pytest

import fastlstm
from fastlstm.cli import profile as cli
from fastlstm.cli.main import main
from fastlstm.cli.train_command import train_command
from fastlstm.text.data.loader import TextLoader
from fastlstm.tuning import profile
from fastlstm.tuning.profile import Profiled, Profiler
from fastlstm.tuning.variants import CHANGES_LEARNING, EXACT, Variant
from fastlstm.tuning.verdicts import Verdict, of_pairs

SIZES = {"rnn_size": 16, "embed_size": 8, "batch_size": 4, "seq_length": 16}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("It was the best of times, it was the worst of times. " * 400)
    return path


def variant(cause: str = "threads") -> Variant:
    return Variant(cause, EXACT, {"threads": 2}, None, 1, lambda: 1)  # type: ignore[arg-type]


def test_the_gain_of_steps_is_that_of_the_run_where_nothing_is_between_them():
    base, other = [0.2, 0.21, 0.2, 0.19, 0.2, 0.2], [0.1, 0.105, 0.1, 0.095, 0.1, 0.1]
    verdict = of_pairs(variant(), base, other, "tokens")
    assert verdict.gain == pytest.approx(1.0, abs=0.02)
    assert verdict.share == pytest.approx(0.5, abs=0.01)
    assert verdict.is_recommended
    half = of_pairs(variant(), base, other, "tokens", step_share=0.5)
    assert half.gain == pytest.approx(1 / 0.75 - 1, abs=0.02)


def test_a_gain_that_is_small_or_unsure_is_not_recommended():
    assert not Verdict("threads", 0.0, 0.04, 0.03, 0.05, EXACT).is_recommended
    assert not Verdict("threads", 0.1, 0.2, -0.1, 0.6, EXACT).is_recommended
    assert Verdict("threads", 0.1, 0.2, 0.1, 0.3, EXACT).is_recommended


def test_a_slow_loader_is_the_first_verdict(monkeypatch, text, tmp_path):
    monkeypatch.setattr(profile, "TURN_S", 0.02)
    every = profile.candidates
    monkeypatch.setattr(profile, "candidates", lambda trainer: every(trainer)[:1])
    take = TextLoader.next

    def slow(self: TextLoader) -> object:
        time.sleep(0.05)  # far more than a step takes on a busy machine
        return take(self)

    monkeypatch.setattr(TextLoader, "next", slow)
    profiler = Profiler(0.5)
    with pytest.raises(Profiled):
        fastlstm.train(
            str(text), out=tmp_path / "run", steps=1000, eval_every=1000, precision="fp32",
            observers=[], callbacks=[profiler], cache_dir=str(tmp_path / "cache"), **SIZES,
        )  # fmt: skip
    found = profiler.result
    assert found is not None
    first = max(found.verdicts, key=lambda verdict: verdict.gain)
    assert (first.cause, first.effect) == ("input", EXACT)
    assert sum(found.phases.values()) == pytest.approx(1.0, abs=0.05)


def test_commands_keep_what_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["book.txt", "--batch-size", "8", "--time", "5s", "--threads", "1"]
    command = train_command(cli.COMMAND, cli._OWN, argv, {"threads": 2})
    assert command == "fastlstm train book.txt --batch-size 8 --threads 2 --out runs/book"
    Path("runs/book").mkdir(parents=True)
    assert train_command(cli.COMMAND, cli._OWN, argv, {"threads": 2}).endswith("--out runs/book-2")


def test_gains_are_said_with_their_interval():
    verdict = Verdict("batch size", 0.3, 0.5, 0.4, 0.6, CHANGES_LEARNING)
    assert cli.gain_text(verdict) == "+50 % speed (40 to 60 %)"
    assert "no interval" in cli.gain_text(Verdict("t", 0.3, 0.5, -1.0, math.inf, EXACT))


def test_a_forecaster_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"kind": "forecaster"}')
    (tmp_path / "manifest.json").write_text("{}")
    assert main(["profile", str(tmp_path)]) != 0
    assert "Traceback" not in capsys.readouterr().err
