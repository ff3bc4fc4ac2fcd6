import json
import math
import os
import shlex
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import DeviceType

import fastlstm
from fastlstm.cli import profile as cli
from fastlstm.cli.command import parse
from fastlstm.cli.main import main
from fastlstm.cli.profile import gain_text, rows
from fastlstm.cli.training import TrainingRun, with_source_of_run
from fastlstm.errors import StorageError
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.train import train_forecaster
from fastlstm.system import hardware
from fastlstm.text.config import TrainConfig
from fastlstm.text.data.lanes import TextLoader
from fastlstm.training.signals import StopFlag
from fastlstm.tuning import op_times, profile
from fastlstm.tuning.op_times import _by_name, _write_trace, check_trace
from fastlstm.tuning.planned_run import _Planner
from fastlstm.tuning.profile import Profile, _of_losses, lower_rate, profile_run, quality_gain
from fastlstm.tuning.turns import Candidate, Timed
from fastlstm.tuning.variants import (
    CHANGES_LEARNING,
    EXACT,
    SAME_QUALITY,
    Variant,
    candidates,
    steps_of,
)
from fastlstm.tuning.verdicts import Verdict, of_pairs, ranked, steps_wanted

SIZES = {"rnn_size": 16, "embed_size": 8, "batch_size": 4, "seq_length": 16}
PROFILE = Profile("tokens", 1.0, None, {}, (), (), 1.0, None, {})
SURE = Verdict("threads", 0.1, 0.12, 0.1, 0.2, EXACT, {"threads": 2})
WIDE = Verdict(
    "output layer", 0.45, 0.8, 0.7, 0.9, CHANGES_LEARNING, {"output_rank": 32}, "10 -> 18",
    axis="output-rank",
)  # fmt: skip


def at_begin(source, folder, look):
    """Sets up a run of a text, and looks at its trainer."""

    class Look(fastlstm.Callback):
        def on_begin(self, trainer):
            look(trainer)
            trainer.end("seen")

    fastlstm.train(
        str(source), out=folder / "run", steps=1000, learning_rate=0.01, precision="fp32",
        optimizer="adamw", observers=[], callbacks=[Look()], cache_dir=str(folder / "cache"),
        **SIZES,
    )  # fmt: skip


def variant(cause="threads"):
    return Variant(cause, EXACT, {"threads": 2}, None, 1, lambda: 1)  # type: ignore[arg-type]


def verdict_on(timed):
    return of_pairs(timed.variant, timed.base, timed.other, "tokens")


def test_the_gain_of_the_run_depends_on_the_share_of_steps():
    base, other = [0.2, 0.21, 0.2, 0.19, 0.2, 0.2], [0.1, 0.105, 0.1, 0.095, 0.1, 0.1]
    verdict = of_pairs(variant(), base, other, "tokens")
    assert verdict.gain == pytest.approx(1.0, abs=0.02)
    assert verdict.share == pytest.approx(0.5, abs=0.01)
    assert verdict.is_recommended
    half = of_pairs(variant(), base, other, "tokens", step_share=0.5)
    assert half.gain == pytest.approx(1 / 0.75 - 1, abs=0.02)


def test_a_small_or_uncertain_gain_is_not_recommended():
    assert not Verdict("threads", 0.0, 0.04, 0.03, 0.05, EXACT).is_recommended
    assert not Verdict("threads", 0.1, 0.2, -0.1, 0.6, EXACT).is_recommended
    assert Verdict("threads", 0.1, 0.2, 0.1, 0.3, EXACT).is_recommended


def test_a_slow_loader_is_the_first_verdict(monkeypatch, text, tmp_path):
    monkeypatch.setattr(profile, "TURN_S", 0.02)
    every = profile.candidates
    monkeypatch.setattr(profile, "candidates", lambda trainer: every(trainer)[:1])
    take = TextLoader.next

    def slow(self):
        time.sleep(0.05)  # far more than a step takes on a busy machine
        return take(self)

    monkeypatch.setattr(TextLoader, "next", slow)
    found = text_profile(text, tmp_path, 0.5, steps=1000, eval_every=1000)
    first = max(found.verdicts, key=lambda verdict: verdict.gain)
    assert (first.cause, first.effect) == ("input", EXACT)
    assert sum(found.phases.values()) == pytest.approx(1.0, abs=0.05)


def described(argv):
    """Returns the run that a command line describes; its text need not exist."""
    return TrainingRun(argv, parse(cli.COMMAND, argv), TrainConfig(), set(), False)


def test_commands_keep_what_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["book.txt", "--batch-size", "8", "--measure", "5s", "--threads", "1"]
    command = described(argv).train_command({"threads": 2})
    assert command == "fastlstm train book.txt --batch-size 8 --threads 2 --out runs/book"
    Path("runs/book").mkdir(parents=True)
    assert described(argv).train_command({"threads": 2}).endswith("--out runs/book-2")


def test_gains_are_printed_with_their_interval():
    verdict = Verdict("batch size", 0.3, 0.5, 0.4, 0.6, CHANGES_LEARNING)
    assert gain_text(verdict) == "+50 % speed (40 to 60 %)"
    assert "no interval" in gain_text(Verdict("t", 0.3, 0.5, -1.0, math.inf, EXACT))


def test_a_run_that_does_not_name_its_source_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"kind": "forecaster"}')
    (tmp_path / "manifest.json").write_text("{}")
    assert main(["profile", str(tmp_path)]) == 2
    assert "do not say what it was trained on" in capsys.readouterr().err


def test_only_time_to_quality_recommends_a_change_of_learning():
    faster = Verdict("batch size", 0.5, 1.0, 0.8, 1.2, CHANGES_LEARNING)
    assert not faster.is_recommended  # what it ends at is not known
    worse = replace(faster, quality_gain=-0.2, quality_low=-0.4)
    better = replace(faster, gain=-0.3, low=-0.4, quality_gain=0.5, quality_low=0.2)
    assert not worse.is_recommended
    assert better.is_recommended
    assert [v.worth for v in ranked([worse, replace(better, cause="optimizer")])] == [0.5, -0.2]


def test_a_faster_change_without_recommendation_is_printed():
    verdict = Verdict("batch size", 0.5, 1.0, 0.8, 1.2, CHANGES_LEARNING, {}, "", True, -0.2, -0.3)
    lines = dict(rows(replace(PROFILE, verdicts=(verdict,)), {}))
    assert "not expected to reach the same quality sooner" in lines["not advised"]
    assert "healthy" in lines["verdict"]


def test_kernels_and_ceiling_are_printed():
    known = {"kernels": ("layer 0: a", "layer 1: b"), "ceiling_how": "torch.mm, not limited"}
    lines = rows(Profile("tokens", 1.0, 0.5, {}, (), (), 1.0, None, {}, **known), {})
    assert lines[0] == ("speed", "1 tokens/s in steps, 50 % of the ceiling")
    assert lines[1:4] == [
        ("ceiling", "torch.mm, not limited"), ("kernels", "layer 0: a"), ("", "layer 1: b"),
    ]  # fmt: skip


def test_a_gain_hidden_by_noise_is_undecided():
    noisy = Verdict("threads", 0.7, 2.0, -0.3, 9.0, "same quality expected")
    profile = replace(PROFILE, ceiling_share=0.04, verdicts=(noisy,), others=0.86)
    lines = dict(rows(profile, {}))
    assert lines["verdict"].startswith("undecided: ")
    assert lines["not advised"] == "threads: +200 % speed (-30 to 900 %), too unsure for a verdict"
    assert lines["noise"] == "other processes used 86 % of the cores; repeat on an idle machine"
    assert profile.to_dict()["is_undecided"] is True
    small = replace(noisy, gain=0.02, low=-0.01, high=0.06)
    lines = dict(rows(replace(profile, verdicts=(small,), others=0.05), {}))
    assert "healthy" in lines["verdict"]
    assert not {"noise", "not advised"} & set(lines)


@pytest.mark.parametrize(
    ("gain", "low", "high", "is_undecided"),
    [
        (-0.23, -1.0, math.inf, True),  # two slow pairs: no interval
        (-0.1, -0.4, 0.35, True),
        (0.04, -0.3, 9.0, True),
        (0.06, -0.01, 0.07, True),  # "nothing above 5 %" would be false
        (-0.1, -0.4, 0.04, False),
        (0.03, 0.0, 0.07, False),  # as exact as it gets
        (0.2, 0.1, 0.4, False),  # recommended
    ],
)
def test_a_run_is_healthy_only_if_gains_above_5_percent_are_excluded(gain, low, high, is_undecided):
    verdict = Verdict("threads", 0.1, gain, low, high, "same quality expected", {"threads": 2})
    found = replace(PROFILE, verdicts=(verdict,))
    assert found.is_undecided is is_undecided
    lines = dict(rows(found, {}))
    assert lines.get("verdict", "").startswith("undecided") is is_undecided
    assert ("too unsure" in lines.get("not advised", "")) is is_undecided


def test_more_threads_beside_others_are_undecided():
    """The run had one thread, a neighbour of equal priority the other core: it was healthy."""
    options = SimpleNamespace(threads=1)
    task, plan = SimpleNamespace(unit="tokens"), SimpleNamespace(options=options)
    trainer = SimpleNamespace(task=task, plan=plan)
    for threads, waits, is_held_back in ((2, 0.9, True), (2, 0.12, False), (1, 0.9, False)):
        two = Variant("threads", SAME_QUALITY, {"threads": threads}, None, threads, lambda: 1)
        two.waits = [waits, waits]
        timed = Timed(two, Candidate(variant), [1.0] * 6, [1.3] * 6)
        verdict = profile._verdict(trainer, timed, 1.0, 1.0, 1)
        assert verdict.is_held_back is verdict.is_undecided is is_held_back
        faster = profile._verdict(trainer, replace(timed, other=[0.7] * 6), 1.0, 1.0, 1)
        assert faster.is_recommended
        assert not faster.is_undecided
        lines = dict(rows(replace(PROFILE, verdicts=(verdict,), others=0.6), {}))
        assert lines["verdict"].startswith("undecided" if is_held_back else "nothing above 5 %")
        assert ("waited for cores" in lines.get("not advised", "")) is is_held_back


def test_only_verdicts_by_speed_are_undecided():
    noisy = Verdict("batch size", 0.1, 0.3, -0.3, 0.9, CHANGES_LEARNING)
    assert not noisy.is_undecided  # faster or not, its quality is not known
    assert not replace(noisy, quality_gain=-0.2, quality_low=-0.4).is_undecided
    assert replace(noisy, quality_gain=0.3, quality_low=-0.3).is_undecided  # a table: its speed
    assert replace(noisy, axis="output-rank").is_undecided  # tune is to try it, if it is faster
    assert not replace(noisy, effect=EXACT, is_in_steps=False).is_undecided


def test_an_undecided_verdict_hides_a_worthless_one_of_its_cause():
    sure = Verdict("threads", 0.0, -0.1, -0.12, -0.08, EXACT, {"threads": 1})
    unsure = Verdict("threads", 0.0, -0.2, -0.6, 0.7, EXACT, {"threads": 4})
    gains = Verdict("threads", 0.0, 0.2, 0.15, 0.25, EXACT, {"threads": 3})
    assert ranked([sure, unsure]) == ranked([unsure, sure]) == [unsure]
    assert ranked([gains, sure, replace(unsure, gain=0.3)]) == [gains]


def test_recommendations_come_before_changes_for_tune():
    other = Verdict("batch size", 0.5, 1.0, 0.8, 1.2, CHANGES_LEARNING)
    assert (WIDE.is_recommended, WIDE.is_to_try, SURE.is_to_try) == (False, True, False)
    assert not replace(WIDE, low=-0.1).is_to_try
    assert not replace(WIDE, high=math.inf).is_to_try
    order = [verdict.cause for verdict in ranked([other, WIDE, SURE])]
    assert order == ["threads", "output layer", "batch size"]
    found = replace(PROFILE, verdicts=tuple(ranked([WIDE, SURE])))
    lines = rows(found, {"output layer": "fastlstm tune book.txt --axes output-rank"})
    place = [label for label, _ in lines].index("2. output layer")
    assert "changes learning, and its effect on the result is not known" in lines[place][1]
    assert lines[place + 1][1].startswith("45 % of the time; ")
    assert lines[place + 2][1] == "fastlstm tune book.txt --axes output-rank"
    assert "not advised" not in dict(lines)


def test_the_command_of_a_search_has_a_budget_and_its_own_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = replace(PROFILE, verdicts=(WIDE,))
    monkeypatch.setattr(profile, "profile_run", lambda source, config, *_: (found, config))
    Path("my book.txt").write_text("It was the best of times. " * 100)
    assert main(["profile", "my book.txt", "--steps", "50", "--vocab", "bpe"]) == 0
    command = "fastlstm tune 'my book.txt' --vocab bpe --budget 5m --axes output-rank"
    assert f"{command} --out 'tuning/my book'" in capsys.readouterr().out


def test_a_lower_rate_gains_the_steps_that_it_saves():
    high = [4.0 - 0.01 * step for step in range(48)]
    low = [4.0 - 0.02 * step for step in range(48)]
    verdict = _of_losses(high, low, 0.1)
    assert verdict.quality_gain == pytest.approx(0.9, abs=0.2)
    assert verdict.is_recommended
    assert not _of_losses(low, high, 0.1).is_recommended
    assert _of_losses([math.inf] * 48, low, 0.1).is_recommended  # diverged


def test_a_normal_rate_is_not_tried_and_the_law_predicts_gains(text, tmp_path):
    found = list[Any]()

    def probe(trainer):
        found.extend(lower_rate(trainer, rate, 60.0) for rate in (0.01, 0.001))
        for options in ({}, {"batch_size": 8}, {"output_rank": 8}):
            found.append(quality_gain(trainer, 1e4, options, (2.0, 2.0)))

    at_begin(text, tmp_path, probe)
    normal, high, same, larger_batch, unknown = found
    assert normal is None
    assert high.cause == "learning rate"
    assert same[0] == pytest.approx(1.0, rel=1e-6)  # twice the speed
    assert same[1] < same[0]  # by the error of the law
    assert larger_batch[0] < same[0]  # half the steps
    assert unknown is None


# float32 has no kernels of its own where bf16 has instructions.
UNITS = {"scalar": "portable code", "avx2": "AVX2"}


@pytest.mark.isa
def test_the_profile_of_a_run_is_stored_in_it(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(profile, "TURN_S", 0.01)
    monkeypatch.chdir(tmp_path)
    sizes = [w for n, v in SIZES.items() for w in (f"--{n.replace('_', '-')}", str(v))]
    shared = ["--precision", "fp32", "--cache-dir", str(tmp_path / "cache")]
    assert main(["train", str(text), "--out", "run", "--steps", "3", *sizes, *shared]) == 0
    capsys.readouterr()
    trace = tmp_path / "trace.json"
    words = ["profile", "run", "--measure", "1s", "--trace", str(trace), "--ops"]
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(Path("run/profile.json").read_text()) == said
    assert {"evaluation", "checkpoints"} <= {v["cause"] for v in said["verdicts"]}
    assert json.loads(trace.read_text())["traceEvents"]
    (kernels,) = said["kernels"]
    assert f"fused LSTM fp32 ({UNITS.get(hardware.cpu().isa, 'AVX-512')}, 1 thread" in kernels
    assert said["machine"]["isa"] == hardware.cpu().isa
    assert "in fp32, 1 thread" in said["ceiling_how"]
    assert {"LSTM forward", "output and loss backward"} <= {op["name"] for op in said["ops"]}
    assert sum(op["share"] for op in said["ops"]) == pytest.approx(1.0)
    kernel = next(op for op in said["ops"] if op["name"] == "LSTM forward")
    T, B, E, H = SIZES["seq_length"], SIZES["batch_size"], SIZES["embed_size"], SIZES["rnn_size"]
    V = len(set(text.read_text()))  # the input product is one row per character of the vocabulary
    gflop = 8e-9 * H * (H * T * B + E * (V + 1))
    assert kernel["gflops"] * kernel["seconds"] == pytest.approx(gflop, rel=0.05)
    for verdict in said["verdicts"]:
        assert not verdict["command"] or "--config run/config.json" in verdict["command"]


def test_profiles_the_training_of_a_forecaster(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(profile, "TURN_S", 0.01)
    table = tmp_path / "table.csv"
    lines = [f"{math.sin(t / 5):.4f},{math.cos(t / 7):.4f}" for t in range(600)]
    table.write_text("\n".join(["y,z", *lines]))
    words = ["profile", str(table), "--horizon", "4", "--target", "y", "--hidden-size", "8"]
    words += ["--batch-size", "4", "--measure", "1s", "--steps", "500", "--json"]
    assert main([*words, "--cache-dir", str(tmp_path / "cache")]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["unit"] == "windows"
    verdicts = {v["cause"]: v for v in said["verdicts"]}
    assert "batch size" in verdicts
    # 500 steps of 4 windows have time for one evaluation of the 57 validation windows each 167.
    assert "every 167 steps" in verdicts["evaluation"]["evidence"]


@pytest.mark.parametrize("forced", [None, "scalar", "avx2"])
def test_a_narrower_instruction_set_is_named(text, tmp_path, monkeypatch, forced):
    monkeypatch.setattr(profile.hardware, "widest_isa", lambda: "avx2")
    monkeypatch.setattr(profile.environment, "forced_isa", lambda: forced)
    monkeypatch.setattr(profile, "_verdicts_by_turns", lambda *_: ([], []))
    told = "instruction set: FASTLSTM_ISA limits the kernels to scalar, this CPU has avx2; unset it"
    found = text_profile(text, tmp_path, 0.1)
    assert found.not_timed == ((told,) if forced == "scalar" else ())


def test_a_narrower_output_is_tried_for_a_large_vocabulary(tmp_path):
    tokens, options = tmp_path / "text.txt", list[dict[str, object]]()
    tokens.write_text("".join(chr(0x4E00 + i * i % 900) for i in range(9000)), "utf-8")

    def look(trainer):
        for variant in [candidate.make() for candidate in candidates(trainer)]:
            options.append(variant.options)
            variant.warm_up(1)
            variant.close()

    at_begin(tokens, tmp_path, look)
    assert {"output_rank": 8} in options


def test_printed_commands_read_the_same_sources_and_switches():
    def command(*argv):
        return described(list(argv)).train_command({"threads": 2})

    assert command("--residual=yes", "a.txt").split()[2:5] == ["a.txt", "--residual", "--threads"]
    assert "--no-residual" in command("a.txt", "--residual=off")
    assert command("--", "-a.txt").startswith("fastlstm train ./-a.txt --threads 2")
    assert command("-").startswith("fastlstm train - --threads 2")


def test_a_printed_command_has_the_recommended_learning_rate():
    for options in ({"learning_rate": 0.025}, {"optimizer": "muon", "learning_rate": 0.01}):
        argv = ["a.txt", "--learning-rate", "0.1", "--optimizer=adamw"]
        words = described(argv).train_command(options).split()
        assert words.count("--learning-rate") == 1
        assert words[words.index("--learning-rate") + 1] == str(options["learning_rate"])


def run_of(path, source, **config):
    """Makes a directory that is a run as far as its config.json goes."""
    path.mkdir()
    text = {"format": "fastlstm-run", "format_version": 2, "data": {"source": source}, "train": {}}
    (path / "config.json").write_text(json.dumps(text | config))
    return path


def test_the_source_of_a_run_is_found_or_requested(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a, b.txt", "x.csv", "y.csv"):
        Path(name).write_text("1,2\n")
    run = run_of(tmp_path / "run", "a, b.txt")
    source_of = partial(with_source_of_run, text=cli.COMMAND, table=cli.TABLE_COMMAND)
    more = ["--measure=2s", "--residual=yes"]
    found = source_of(["run", *more])
    assert found == (["a, b.txt", "--config", "run/config.json", *more], Path("run"))
    table = run_of(tmp_path / "table", "", kind="forecaster")
    (table / "metrics.jsonl").write_text('{"event":"start","source":"x.csv, y.csv"}\n')
    assert source_of(["table"])[0][:2] == ["x.csv", "y.csv"]
    (table / "metrics.jsonl").write_text('{"event":"start","source":"s3://a/x, s3://a/y"}\n')
    assert source_of(["table"])[0][:2] == ["s3://a/x", "s3://a/y"]
    # A run is an argument, not the value of an option.
    assert source_of(["x.csv", "--out", "run"]) == (["x.csv", "--out", "run"], None)
    assert main(["profile", "run", "table"]) == 2
    assert "give one run" in capsys.readouterr().err
    for source in ("x.csv and 1 more", "gone.txt"):
        about = {"format": "fastlstm-run", "data": {"source": source}}
        (run / "config.json").write_text(json.dumps(about))
        assert main(["profile", "run"]) == 2
        said = capsys.readouterr().err
        assert f"run was trained on {source}, which does not exist" in said
        assert "fastlstm profile --config run/config.json SOURCE" in said


@pytest.mark.parametrize("verb", ["profile", "scale"])
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("x.csv --horizn run", "'--horizn' (did you mean '--horizon'?)"),
        ("x.csv --horizn run --batch-size 4", "'--horizn' (did you mean '--horizon'?)"),
        ("--batch-siz run", "'--batch-siz' (did you mean '--batch-size'?)"),
        ("run --batch-siz 4", "'--batch-siz' (did you mean '--batch-size'?)"),
        ("run table --lanez 4", "'--lanez' (did you mean '--lane-reset'?)"),
    ],
)
def test_an_unknown_flag_before_a_run_is_named_first(
    verb, words, told, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name in ("x.csv", "a.txt"):
        Path(name).write_text("1,2\n")
    run_of(tmp_path / "run", "a.txt")
    run_of(tmp_path / "table", "x.csv", kind="forecaster")
    assert main([verb, *words.split()]) == 2
    assert f"error: unknown flag {told}; see fastlstm {verb}" in capsys.readouterr().err


def test_the_run_of_a_sequence_model_is_refused(tmp_path, capsys):
    run = run_of(tmp_path / "run", "x", kind="sequence")
    assert main(["profile", str(run)]) == 2
    assert "is a sequence model" in capsys.readouterr().err


def test_a_file_other_than_a_trace_is_not_replaced(tmp_path, text, capsys):
    before = text.read_bytes()
    os.mkfifo(tmp_path / "pipe")
    for name in ("text.txt", "pipe", ".", "none/trace.json", "caf\udce9"):
        assert main(["profile", str(text), "--trace", str(tmp_path / name)]) == 1
    errors = capsys.readouterr().err
    assert "exists and is no trace" in errors
    assert "the name is not UTF-8" in errors
    assert text.read_bytes() == before
    trace = tmp_path / "trace.json"
    trace.write_text('{\n  "schemaVersion": 1,')
    check_trace(trace)


def test_a_trace_that_cannot_be_written_is_an_error(tmp_path):
    def full_disk(name):
        Path(f"{name}.tmp").touch()

    trace = tmp_path / "trace.json"
    trace.write_text('{"schemaVersion": 1}')
    with pytest.raises(StorageError, match="the disk may be full"):
        _write_trace(SimpleNamespace(export_chrome_trace=full_disk), trace)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def instant(monkeypatch):
    """A profile that is there at once, without a run."""
    found = replace(PROFILE, verdicts=(SURE,))
    monkeypatch.setattr(profile, "profile_run", lambda source, config, *_: (found, config))


def test_no_profile_is_written_into_a_checkpoint(tmp_path, text, instant, capsys):
    run = run_of(tmp_path / "run", str(text))
    checkpoint = run_of(run / "checkpoint-3", str(text))
    (checkpoint / "trainer.json").write_text("{}")
    for path, is_kept in ((run, True), (checkpoint, False)):
        assert main(["profile", str(path)]) == 0
        assert (path / "profile.json").exists() == is_kept


def test_a_profile_that_cannot_be_stored_is_printed(tmp_path, text, instant, capsys):
    run = run_of(tmp_path / "run", str(text))
    (run / "profile.json").mkdir()
    assert main(["profile", str(run), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["verdicts"]
    assert "this profile is not kept in the run" in said.err


@pytest.mark.usefixtures("hang_up_at_default")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_profile_at_once(number, monkeypatch):
    def is_signalled(trainer):
        os.kill(os.getpid(), number)
        time.sleep(20)

    closed = list[bool]()
    with StopFlag() as stop:
        loader = SimpleNamespace(close=lambda: closed.append(True), steps_per_epoch=1)
        plan, task = SimpleNamespace(options=None), SimpleNamespace(loader=loader)
        trainer = SimpleNamespace(plan=plan, task=task, stop=stop)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            _Planner(is_signalled).on_begin(trainer)
        assert not stop()
        stop.set()
        with pytest.raises(KeyboardInterrupt):
            _Planner(is_signalled).on_begin(trainer)
    assert closed == [True, True]


def test_steps_between_evaluations_are_at_most_those_of_the_run():
    assert steps_wanted(2.0, 5, 1e6) == 98  # 2 of 100 steps
    assert steps_wanted(2.0, 5, 60.0) == 60
    assert steps_wanted(2.0, 500, 60.0) == 500


def test_variants_of_a_table_have_the_threads_of_the_run(tmp_path):
    seen = list[int]()

    class Look(fastlstm.Callback):
        def on_begin(self, trainer):
            assert trainer.plan.options.threads is None
            torch.set_num_threads(3)
            waiting = candidates(trainer)
            torch.set_num_threads(1)  # as a variant with one thread leaves it
            made = [candidate.make() for candidate in waiting]
            seen.extend(v.threads for v in made if "threads" not in v.options)
            for variant in made:
                variant.close()
            trainer.end("seen")

    rows = np.stack([np.sin(np.arange(400) / 5), np.cos(np.arange(400) / 7)], 1)
    sizes = {"hidden_size": 8, "batch_size": 4, "input_size": 16}
    train_forecaster(rows, ForecastConfig(horizon=4, steps=50, **sizes), callbacks=[Look()])
    assert seen
    assert set(seen) == {3}


def text_profile(text, tmp_path, seconds, with_ops=False, **options):
    """Returns the profile of a run of a text."""
    cache = {"cache_dir": str(tmp_path / "cache"), "steps": 50, "precision": "fp32"}
    values = {**SIZES, **cache, **options}
    return profile_run(str(text), TrainConfig(**values), set(values), seconds, with_ops)[0]


def test_the_threads_of_the_run_are_restored_after_the_turns(text, tmp_path, monkeypatch):
    seen = list[int]()

    def last_turn_with_three_threads(*_):
        torch.set_num_threads(3)
        return [], []

    monkeypatch.setattr(profile, "time_in_turns", last_turn_with_three_threads)
    monkeypatch.setattr(profile, "op_times", lambda *_: seen.append(torch.get_num_threads()) or [])
    text_profile(text, tmp_path, 0.1, with_ops=True, threads=1)
    assert seen == [1]


def test_a_skipped_step_counts_as_much_work_as_others(text, tmp_path, monkeypatch):
    found = list[int]()

    def look(trainer):
        step = steps_of(trainer)
        found.append(step())
        monkeypatch.setattr(trainer, "step", lambda *_: (math.nan, math.nan))
        found.append(step())

    at_begin(text, tmp_path, look)
    assert found == [SIZES["batch_size"] * SIZES["seq_length"]] * 2


def test_the_first_recommendation_has_the_gain_of_a_second_measurement(monkeypatch):
    """Of several noisy gains the largest one, which is recommended first, is too large."""
    made = [replace(variant(cause), options={cause: 1}) for cause in ("threads", "precision")]
    makers = [Candidate(lambda one=one: one) for one in made]
    speeds = {"threads": 1.6, "precision": 1.4}

    def in_turns(base, makers, *_):
        pairs = ([1.0] * 6, [1.0 / speeds[one.cause] for one in made])
        return [Timed(one, c, pairs[0], [pairs[1][n]] * 6) for n, (one, c) in
                enumerate(zip(made, makers, strict=True))], []  # fmt: skip

    def alone(base, candidate, is_enough, *_):
        again = Timed(candidate.make(), candidate, [1.0] * 6, [1.0 / 1.5] * 6)
        assert is_enough(again)
        return again

    monkeypatch.setattr(profile, "time_in_turns", in_turns)
    monkeypatch.setattr(profile, "time_until", alone)

    for seconds, gain in ((60.0, 0.5), (0.0, 0.6)):  # without time there is no second one
        now = time.perf_counter()
        found, _ = profile._verdicts_by_turns(None, makers, [], verdict_on, now, seconds)
        assert {v.cause: round(v.gain, 3) for v in found} == {"threads": gain, "precision": 0.4}


def test_the_best_undecided_change_is_timed_alone(monkeypatch):
    """Half of the time was left, and the run was said to be healthy after two slow turns."""
    two, candidate = variant(), Candidate(variant)
    slow = Timed(two, candidate, [1.0] * 2, [1.3] * 2)
    fast = Timed(two, candidate, [1.0] * 6, [1.0 / 1.5] * 6)
    monkeypatch.setattr(profile, "time_in_turns", lambda *_: ([slow], []))
    monkeypatch.setattr(profile, "time_until", lambda *_: fast)
    often = Verdict("evaluation", 0.1, 0.2, 0.2, 0.2, EXACT, {"eval_every": 9}, "", False)

    for others in ([], [often]):  # one by accounting leaves the time to those of turns
        found, _ = profile._verdicts_by_turns(
            None, [candidate], others, verdict_on, time.perf_counter(), 60.0
        )
        assert found[-1].gain == pytest.approx(0.5)
        assert found[-1].is_recommended


def test_printed_commands_do_not_write_to_the_same_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rarer = replace(SURE, cause="evaluation", options={"eval_every": 9})
    found = replace(PROFILE, verdicts=(SURE, rarer, WIDE))
    for argv, folders in (
        (["book.txt"], ["runs/book", "runs/book-2", "tuning/book"]),
        (["book.txt", "--out=x y"], ["x y", "x y-2", "x y-3"]),
    ):
        commands = cli._commands(found, described(argv), {})
        assert [shlex.split(command)[-1] for command in commands.values()] == folders


def test_gpu_kernels_are_not_counted_twice():
    events = [
        SimpleNamespace(
            key=key, device_type=kind, self_device_time_total=us, count=6, flops=0, input_shapes=[]
        )
        for key, kind, us in (
            ("aten::mm", DeviceType.CPU, 3.0), ("kernel<float>", DeviceType.CUDA, 3.0),
            ("Optimizer.step", DeviceType.CUDA, 9.0),
        )
    ]  # fmt: skip
    (op,) = _by_name(events, 3, "cuda", 4.0)
    assert (op.name, op.share, op.calls, op.seconds) == ("aten::mm", 1.0, 2.0, 1e-6)
    assert (op.gflops, op.ceiling_share) == (None, None)
    events[0].flops = 6_000
    (op,) = _by_name(events, 3, "cuda", 4.0)
    assert (op.gflops, op.ceiling_share) == (pytest.approx(2.0), pytest.approx(0.5))


def test_operations_are_recorded_again_if_torch_returns_none(monkeypatch):
    answers = iter([[], ["an operation"]])
    monkeypatch.setattr(op_times, "_recorded", lambda *_: next(answers))
    assert op_times.op_times(None) == ["an operation"]


def test_flop_of_a_bidirectional_layer():
    """One event of the profiler stands for both directions."""
    layer, x = fastlstm.LSTM(64, 128, bidirectional=True), torch.randn(50, 8, 64)
    with torch.profiler.profile(record_shapes=True) as seen:
        layer(x)[0].sum().backward()
    found = {
        e.key: e.count * op_times._flop(e.key, e.input_shapes)
        for e in seen.key_averages(group_by_input_shape=True)
        if e.key in ("fastlstm::lstm", "fastlstm::lstm_backward")
    }
    forward = 2 * 8 * 128 * 50 * 8 * (64 + 128)
    assert found == {"fastlstm::lstm": forward, "fastlstm::lstm_backward": 2 * forward}
