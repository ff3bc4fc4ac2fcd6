"""What holds writing back: planted causes come first, healthy ones are not recommended."""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastlstm.cli import profile_generation as cli
from fastlstm.cli.main import main
from fastlstm.errors import CommandError
from fastlstm.text.sampling import Sampling
from fastlstm.text.stored_model import load_stored_model
from fastlstm.text.writing import Text
from fastlstm.tuning import generation_profile, generation_variants
from fastlstm.tuning.generation_profile import profile_generation, time_variants, with_quality
from fastlstm.tuning.generation_variants import Generation, as_stored, variants
from stored_run import SlowDecoder, publish


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("it was the best of times. it was the worst of times.\n" * 400)
    return publish(tmp_path / "run", source=str(text))


@pytest.fixture
def base(run: Path) -> Generation:
    return as_stored(load_stored_model(run), None, Sampling())


@pytest.fixture
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_profile, "TURN_S", 0.01)
    monkeypatch.setattr(generation_variants, "STREAM_COUNTS", (4,))


def test_slow_weights_are_the_first_verdict(base: Generation, short_turns: None) -> None:
    slow = replace(base, decoder=SlowDecoder(base.decoder, 0.02))
    profile = profile_generation(slow, 4.0)
    first = profile.recommended[0]
    assert (first.cause, first.effect) == ("weights", "changes weights")
    assert first.gain > 1.0
    assert "bits/char" in first.evidence
    assert [one.count for one in profile.streams] == [1, 4]
    assert json.dumps(profile.to_dict())


def test_a_slow_sampler_is_found_by_leaving_it_out(
    base: Generation, short_turns: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Text.take

    def slow(self: Text) -> str:
        time.sleep(0.02 if self.stream in sampled else 0.0)
        return take(self)

    begin = generation_variants.begin
    sampled = []

    def noted(decoder: Any, tokenizer: Any, prompt: str, count: int, one: Sampling) -> Text:
        text = begin(decoder, tokenizer, prompt, count, one)
        sampled.extend([text.stream] if one.temperature > 0 else [])
        return text

    monkeypatch.setattr(generation_variants, "begin", noted)
    monkeypatch.setattr(Text, "take", slow)
    base.warm_up()
    chosen = [one for one in variants(base, []) if one.cause in ("sampler", "threads")]
    verdicts = {v.cause: v for _, v in time_variants(base, chosen, 0.1)}
    assert verdicts["sampler"].share > 0.5
    assert verdicts["sampler"].effect == "changes the text"


def test_variants_have_state_of_their_own(base: Generation) -> None:
    found = list(variants(base, []))
    assert {one.cause for one in found} == {"weights", "sampler", "threads", "texts at once"}
    found[0].warm_up()
    assert found[0].tokens > 0
    assert base.tokens == 0


def test_what_is_greedy_has_no_sampler_to_leave_out(base: Generation) -> None:
    greedy = replace(base, sampling=Sampling(temperature=0.0))
    assert "sampler" not in {one.cause for one in variants(greedy, [])}


def test_a_stop_string_does_not_end_the_measurement(base: Generation) -> None:
    stopped = replace(base, sampling=Sampling(stop=("a", "e")))
    stopped.warm_up()
    assert stopped.turn(0.0) > 0.0
    assert all(text.stream.is_running for text in stopped._texts)


@pytest.mark.filterwarnings("ignore:the native decoder:UserWarning")
def test_a_cell_that_torch_runs_is_timed_in_fp32_only(tmp_path: Path) -> None:
    path = publish(tmp_path / "run", layer_norm=True)
    not_timed: list[str] = []
    slow = as_stored(load_stored_model(path), None, Sampling())
    assert "weights" not in {one.cause for one in variants(slow, not_timed)}
    assert any("int8" in reason for reason in not_timed)


def test_quality_that_cannot_be_measured_is_said(base: Generation, tmp_path: Path) -> None:
    (tmp_path / "text.txt").unlink()
    slow = replace(base, decoder=SlowDecoder(base.decoder, 0.02))
    slow.warm_up()
    chosen = [one for one in variants(base, []) if one.cause == "weights"][:1]
    reasons: list[str] = []
    verdicts = with_quality(slow, time_variants(slow, chosen, 0.1), reasons)
    assert "bits/char" not in verdicts[0].evidence
    assert "unreadable" in reasons[0]


def test_commands_keep_what_was_given(base: Generation) -> None:
    argv = ["runs/book", "--generation", "--temperature", "0.8", "--measure", "5s"]
    verdict = generation_profile.Verdict("weights", 0.5, 1.0, 0.9, 1.1, "", {"weights": "int8"})
    text = cli._command(argv, "runs/book", verdict)
    assert text == "fastlstm generate runs/book --temperature 0.8 --weights int8"
    streams = replace(verdict, options={"streams": 4})
    assert cli._command(argv, "runs/book", streams) == (
        "python -c 'from fastlstm import LM; "
        'print(LM.load("runs/book").generate_batch([""] * 4, max_tokens=500, temperature=0.8))\''
    )
    argv += ["--prompt", 'it\'s "so"', "--weights=int8", "--stop", "a", "--stop=-b", "--seed", "7"]
    many = cli._command(argv, "runs/book", streams)
    assert many is not None
    assert shlex.split(many)[2] == (
        'from fastlstm import LM; print(LM.load("runs/book", weights="int8").generate_batch('
        '["it\'s \\"so\\""] * 4, max_tokens=500, temperature=0.8, stop=["a", "-b"], seed=7))'
    )


def test_the_command_line_prints_it_and_verifies(
    run: Path,
    short_turns: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli, "measured_gain", lambda a, b, length: 0.25)
    assert main(["profile", str(run), "--generation", "--measure", "1s", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["chars_per_s"] > 0
    assert {one["cause"] for one in facts["verdicts"]} >= {"weights", "sampler", "threads"}
    assert main(["profile", str(run), "--generation", "--measure", "1s", "--no-verify"]) == 0
    assert "characters/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["{tmp}/none", "--generation"], "none"),
        (["{tmp}/run", "--generation", "--prompt", "É"], "prompt"),
        (["{tmp}/run", "--generation", "--temperature", "-1"], "temperature"),
        (["{tmp}/run", "--generation", "--batch-size", "3"], "--batch-size"),
        (["{tmp}/run", "--generation", "--measure", "soon"], "measure"),
    ],
)
def test_bad_input_is_one_line(
    run: Path, tmp_path: Path, argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *(word.replace("{tmp}", str(tmp_path)) for word in argv)]) == 2
    assert said in capsys.readouterr().err


def test_a_command_that_fails_while_verifying_is_an_error(run: Path) -> None:
    with pytest.raises(CommandError, match="verifying failed"):
        cli.measured_gain([str(run)], [str(run), "--weights", "int9"], 10)
