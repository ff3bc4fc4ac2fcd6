"""The search of `tune`: its study, its limits, what it says."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from fastlstm.cli.main import main
from fastlstm.cli.tune import rows
from fastlstm.errors import FormatError, NonFiniteError, RunDirectoryError, Stopped, UsageError
from fastlstm.text import size_plan
from fastlstm.text.config import ModelConfig, TrainConfig
from fastlstm.training import step_time
from fastlstm.training.optimizer import DEFAULT_LEARNING_RATE
from fastlstm.training.session import locked_run
from fastlstm.tuning import size_limits, text_job, tune
from fastlstm.tuning.job import Space, single_changes, sizes_around
from fastlstm.tuning.planned_run import plan_run
from fastlstm.tuning.size_limits import ModelCost, SizeLimits
from fastlstm.tuning.study import (
    Objective,
    best_trial,
    importance,
    least_time_s,
    open_study,
    rungs_of,
    runs_of,
)
from fastlstm.tuning.text_job import TextJob, values_around, whole_run_bits
from fastlstm.tuning.tune import Search

BASE: dict[str, Any] = {
    "rnn_size": 96, "embed_size": 64, "batch_size": 4, "seq_length": 32, "optimizer": "muon",
    "learning_rate": 0.01, "threads": 1, "precision": "fp32",
}  # fmt: skip
WORDS = ["--budget", "60s", "--axes", "lr", "--precision", "fp32", "--preset", "tiny"]


@pytest.fixture(autouse=True)
def quick_timings(monkeypatch):
    """Takes the seconds of a step as known, long in large models; times latencies briefly."""
    for module in (size_plan, text_job):
        monkeypatch.setattr(module, "step_seconds", lambda config, *_: (config.rnn_size / 96) ** 3)
    monkeypatch.setattr(size_limits, "_TIMED_S", 0.005)
    monkeypatch.setattr(step_time, "TIMED_S", 0.01)


class Runs:
    """Runs that end at 2 and what their options add to it; stops at one of them.

    Attributes:
        seen: options and seconds of each run.
    """

    def __init__(self, truth, stop_at=1000):
        self.truth, self.stop_at, self.seen = truth, stop_at, list[tuple[dict[str, Any], float]]()

    def __call__(self, options, seconds, seed, out):
        self.seen.append((dict(options), seconds))
        if len(self.seen) == self.stop_at:
            raise Stopped("stopped at step 3")
        found = 2.0 + sum(self.truth.get(pair, 0.0) for pair in options.items())
        if math.isinf(found):
            raise NonFiniteError("the loss is NaN")
        return found + 1.0, found


VALUES = {"size": [96, 128, 192], "batch": [4, 8, 16], "optimizer": ["muon", "adamw"]}
SMALL = Space(BASE, {"size": [96, 128]}, [{"size": 128}], [])
SPACE_TO_TRY = Space(BASE, VALUES, [{"size": 192}, {"size": 128, "batch": 16}], [])


def searched(runs, space=SPACE_TO_TRY, rungs=(10.0, 30.0), study=None, seeds=(0,)):
    """Returns a study that has ended: nothing new was suggested."""
    study = study or optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1))
    objective = Objective(TextJob(), space, seeds, rungs, runs, Path("unused"), lambda *_: None)
    objective.enqueue(study)
    objective.optimize(study, 600.0)
    return study


def labels(study):
    return [trial.user_attrs["label"] for trial in study.trials]


def test_the_default_and_the_most_promising_changes_are_tried_first():
    study = searched(Runs({}))
    assert labels(study)[:3] == ["default", "192 units", "128 units, batch 16"]


def test_the_best_of_all_settings_is_found_and_settings_are_not_trained_twice():
    runs = Runs({("rnn_size", 128): -0.1, ("batch_size", 8): -0.1, ("optimizer", "adamw"): -0.1})
    study = searched(runs)
    best, expected, default = best_trial(study)
    assert best.user_attrs["label"] == "128 units, batch 8, adamw"
    assert (expected, default) == (pytest.approx(1.7), 2.0)
    assert best.user_attrs["options"]["learning_rate"] == DEFAULT_LEARNING_RATE["adamw"]
    told = [(json.dumps(options), seconds) for options, seconds in runs.seen]
    assert len(told) == len(set(told))
    assert len(told) <= 2 * 3 * 3 * 2


def test_all_enqueued_trials_are_tried():
    """Trials that wait have no label, which is nothing known."""
    values = {"batch": list(range(1, 41))}
    study = searched(Runs({}), Space(BASE, values, [{"batch": n} for n in values["batch"][1:]], []))
    assert len(set(labels(study))) == 40


def test_only_good_settings_and_the_default_get_longer_runs():
    runs = Runs({("rnn_size", 96): 0.5, ("rnn_size", 192): 0.1})
    study = searched(runs)
    long = [options["rnn_size"] for options, seconds in runs.seen if seconds == 30.0]
    short = [options["rnn_size"] for options, seconds in runs.seen if seconds == 10.0]
    assert long[0] == 96
    assert long.count(96) == 1
    assert len(long) < len(short) / 2
    pruned = study.get_trials(states=(optuna.trial.TrialState.PRUNED,))
    assert pruned
    assert best_trial(study)[0].user_attrs["options"]["rnn_size"] == 128


def test_noise_leaves_the_default():
    best, expected, default = best_trial(searched(Runs({("rnn_size", 192): -0.003})))
    assert (best.user_attrs["label"], expected, default) == ("default", 2.0, 2.0)


def test_failed_runs_are_not_the_best():
    study = searched(Runs({("rnn_size", 192): math.inf, ("rnn_size", 96): math.inf}))
    best, expected, default = best_trial(study)
    assert best.user_attrs["options"]["rnn_size"] == 128
    assert (expected, default) == (2.0, math.inf)
    assert next(run["why"] for run in runs_of(study)) == "the loss is NaN"
    sizes = {("rnn_size", size): math.inf for size in VALUES["size"]}
    with pytest.raises(UsageError, match="every short run failed: the loss is NaN"):
        best_trial(searched(Runs(sizes)))


def test_learning_rates_vary_around_the_enqueued_ones(ended_after_trials):
    ended_after_trials(12)
    space = replace(SPACE_TO_TRY, values={"lr": [1.0, 2.0, 0.5]}, first=[{"lr": 2.0}])
    runs = Runs({})
    searched(runs, space)
    rates = [options["learning_rate"] for options, _ in runs.seen]
    assert rates[0] == 0.01
    assert 0.02 in rates
    assert all(0.0035 < rate < 0.0281 for rate in rates)
    assert len(set(rates)) > 4


def test_every_seed_counts():
    class Seeded(Runs):
        def __call__(self, options, seconds, seed, out):
            bits, expected = super().__call__(options, seconds, seed, out)
            return bits, expected + seed

    study = searched(Seeded({}), seeds=(0, 1))
    assert best_trial(study)[1:] == (2.5, 2.5)
    assert {run["name"] for run in runs_of(study)} >= {"000-10s-0", "000-10s-1", "000-30s-1"}


def test_the_rungs_of_a_search():
    assert rungs_of(600.0, 300.0) == [25.0, 75.0]
    assert rungs_of(3600.0, 300.0) == [33.3, 100.0, 300.0]
    assert rungs_of(90.0, 60.0) == [11.2]
    assert (least_time_s(60.0), least_time_s(5.0), least_time_s(1200.0)) == (90.0, 45.0, 900.0)


def test_optuna_computes_the_importance_of_axes():
    found = importance(searched(Runs({("rnn_size", 128): -0.5})))
    assert max(found, key=found.__getitem__) == "size"
    assert sum(found.values()) == pytest.approx(1.0, abs=0.01)
    assert importance(optuna.create_study()) == {}


def test_options_of_changes():
    job = TextJob()
    assert job.options_of(BASE, {}) == BASE
    changed = job.options_of(BASE, {"lr": 0.5, "optimizer": "adamw", "size": 256})
    assert changed["learning_rate"] == pytest.approx(0.5 * DEFAULT_LEARNING_RATE["adamw"])
    assert (changed["rnn_size"], changed["embed_size"]) == (256, 128)
    assert job.label_of({"size": 256, "lr": 0.5}) == "256 units, learning rate x 0.5"
    narrow = job.options_of(BASE, {"size": 256, "output-rank": 4})
    assert narrow["output_rank"] == 64
    assert "output_rank" not in job.options_of(BASE, {"lr": 2.0})
    assert job.options_of(BASE, {"threads": 2, "precision": "bf16"})["threads"] == 2
    axes = job.open_axes(("size", "lr", "batch"), {"embed_size", "batch_size"})
    assert axes == ["lr"]


def test_limits_lead_to_smaller_sizes():
    assert sizes_around(3, (1, 2, 3, 4, 5, 6), False) == [3, 2, 4, 1, 5]
    assert sizes_around(5, (1, 2, 3, 4, 5, 6), True) == [5, 4, 6, 3, 2, 1]
    assert sizes_around(7, (1, 2, 3), False) == [7]
    assert sizes_around(7, (1, 2, 3), True) == [7, 3, 2, 1]


def test_the_first_change_of_every_axis_comes_before_the_second():
    values = {"size": [128, 64, 256], "lr": [1.0, 0.5, 2.0], "dropout": [0.5, 0.2]}
    assert single_changes(values) == [
        {"size": 64}, {"lr": 0.5}, {"dropout": 0.2}, {"size": 256}, {"lr": 2.0},
    ]  # fmt: skip


def test_a_short_text_bounds_batch_and_sequence_length():
    config = TrainConfig(batch_size=32, seq_length=128, learning_rate=0.01)
    values = values_around(config, 8 * 32 * 128)
    assert values["batch"] == [32, 16]
    assert values["seq-length"] == [128, 64]
    assert values["output-rank"] == [0]
    assert values_around(config, 8 * 32 * 128, has_wide_output=True)["output-rank"] == [0, 4, 2]


def test_limits_are_measured_on_random_weights():
    small = ModelConfig(vocab_size=60, embed_size=64, rnn_size=96)
    cost = SizeLimits(weights="int8").cost(small)
    whole = SizeLimits().cost(small)
    assert 3 < whole.num_bytes / cost.num_bytes < 4.1
    assert SizeLimits(max_bytes=cost.num_bytes).refusal(cost) is None
    assert "limit" in str(SizeLimits(max_bytes=cost.num_bytes - 1).refusal(cost))
    assert SizeLimits(max_latency_s=1.01 * cost.high_s).refusal(cost) is None
    assert "us" in str(SizeLimits(max_latency_s=0.99 * cost.high_s).refusal(cost))


@pytest.mark.parametrize(
    ("limit_us", "times_us", "at_first_us", "interval"),
    [
        (119.0, [100.0, 98.0, 118.0, 140.0, 97.0], 0.0, None),
        (117.0, [100.0, 98.0, 118.0, 140.0], 0.0, "109.0 us per token (100.0 to 119.9)"),
        (111.0, [100.0, 98.0, 101.0, 99.0, 102.0], 90.0, None),
        (109.0, [100.0, 98.0, 101.0, 99.0, 102.0], 90.0, "100.0 us per token (99.0 to 110.0)"),
        (90.0, [100.0, 120.0], 0.0, "110.0 us per token (100.0 to 121.0)"),
        (90.0, [100.0, 50.0, 104.0], 0.0, "100.0 us per token (100.0 to 110.0)"),
        (219.0, [100.0], 200.0, "100.0 us per token (100.0 to 220.0)"),
    ],
)
def test_the_upper_end_of_the_latency_must_keep_the_limit(
    limit_us, times_us, at_first_us, interval
):
    """A median that keeps it is no more at another moment; more is not measured than decides."""
    limits, times = SizeLimits(max_latency_s=limit_us / 1e6), iter(times_us)
    found = limits.measured(1000, lambda: next(times) / 1e6, at_first_us / 1e6)
    told = limits.refusal(found)
    limit = f"the upper end is over the limit of {limit_us:.1f} us"
    assert told == (interval and f"{interval}, fp32; {limit}")
    assert not list(times)


def test_a_size_over_its_bytes_is_timed_once():
    times = iter([100e-6])
    limits = SizeLimits(max_bytes=999)
    assert "of weights" in str(limits.refusal(limits.measured(1000, lambda: next(times))))


def prepared(text, limits=None, **options):
    """Returns what is tried of a text."""
    values = {"preset": "tiny", "budget": "60s", "precision": "fp32", "threads": 1, **options}
    found = list[Space]()
    axes = tuple(axis for axis in TextJob.fields if axis not in ("threads", "precision"))
    search = Search(
        None, None, {"budget"}, Path("unused"), axes=axes, limits=limits or SizeLimits()
    )  # fmt: skip

    def look(trainer):
        found.append(TextJob().prepare(trainer, search, lambda *_: None))

    plan_run(str(text), TrainConfig(**values), {"budget", *options}, look)
    return found[0]


def test_law_and_speeds_choose_the_first_trials(text):
    space = prepared(text)
    assert {"size", "batch", "lr"} <= set(space.values)
    assert space.first[1] == {**space.first[0], "lr": 2.0}
    law = [c for c in space.first if set(c) & {"size", "batch", "seq-length", "optimizer"}]
    assert len(law) == 7
    assert space.units_per_s > 0


@pytest.mark.parametrize("limit_us", [10, 20, 40, 80, 120, 200])
def test_no_size_over_a_limit_of_latency_is_tried(text, monkeypatch, limit_us):
    """The upper end of what was measured counts: 20 % above the latency."""

    def cost(limits, config):
        us = config.rnn_size / 10
        return ModelCost(us / 1e6, 1000, 0.9 * us / 1e6, 1.2 * us / 1e6)

    monkeypatch.setattr(SizeLimits, "cost", cost)
    limits = SizeLimits(max_latency_s=limit_us / 1e6)
    if limit_us < 1.2 * min(size_plan.EMBED_SIZES) / 10:
        with pytest.raises(UsageError, match="no size keeps the limits; the fastest has"):
            prepared(text, limits)
        return
    space = prepared(text, limits)
    sizes = {space.options["rnn_size"], *space.values.get("size", [])}
    assert all(1.2 * size / 10 <= limit_us for size in sizes)
    assert max(sizes) >= min(128, limit_us / 2)


def test_a_study_is_continued_with_the_same_options_only(tmp_path):
    about = {"tune_time": 60.0, "axes": ("size", "lr")}
    out = tmp_path / "t"
    out.mkdir()
    searched(Runs({}), SMALL, study=open_study(out, about, resume=False))
    again = open_study(out, about, resume=True)
    assert labels(again)[0] == "default"
    with pytest.raises(UsageError, match="started with `tune_time=60"):
        open_study(out, about | {"tune_time": 90.0}, resume=True)
    with pytest.raises(UsageError, match="holds a search; continue it with"):
        open_study(out, about, resume=False)
    with pytest.raises(RunDirectoryError, match="holds something else"):
        open_study(tmp_path, about, resume=False)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "study.db").symlink_to(out / "study.db")
    with pytest.raises(FormatError, match="was not written by this fastlstm"):
        open_study(tmp_path / "link", about, resume=True)


@pytest.mark.parametrize("damage", [b"", b"[]", b"SQLite format 3\0" + 200 * b"x"])
def test_a_damaged_study_is_refused(tmp_path, damage):
    file = tmp_path / "study.db"
    file.write_bytes(damage)
    with pytest.raises(FormatError, match="was not written by this fastlstm, or is damaged"):
        open_study(tmp_path, {}, resume=True)


def test_interrupted_trials_are_repeated(tmp_path):
    """After Ctrl-C in the second rung of a trial, and after SIGKILL within another one."""
    stopped = Runs({}, stop_at=4)  # in the second rung of the second trial
    study = open_study(tmp_path, {}, resume=False)
    with pytest.raises(Stopped):
        searched(stopped, SMALL, study=study)
    study.ask({"size": optuna.distributions.CategoricalDistribution([96, 128])})
    runs = Runs({})
    again = searched(runs, SMALL, study=open_study(tmp_path, {}, resume=True))
    broken = stopped.seen[-1]
    assert broken in runs.seen
    assert not [run for run in stopped.seen[:-1] if run in runs.seen], "finished runs are kept"
    assert not again.get_trials(states=(optuna.trial.TrialState.RUNNING,))
    states = [trial.state.name for trial in searched(Runs({}), SMALL, study=again).trials]
    assert states.count("FAIL") == 2


def of_options(monkeypatch, run):
    """Has short runs be a function of options, seconds, seed and directory."""
    monkeypatch.setattr(tune, "_train", lambda *args: run(*args[-4:]))


@pytest.mark.usefixtures("ended_after_two_steps")
def test_the_command_finds_settings_and_can_be_continued(
    text, tmp_path, ended_after_trials, monkeypatch,
    capsys,
):  # fmt: skip
    def short_run(options, seconds, seed, out):
        assert seconds == 6.0
        out.mkdir(parents=True)
        if options["learning_rate"] > 0.01:
            raise NonFiniteError("the loss is NaN")
        return 2.0, 1.8 + options["learning_rate"]

    of_options(monkeypatch, short_run)
    monkeypatch.chdir(tmp_path)
    words = [
        "tune", str(text), "--out", "search", "--budget", "6s",
        "--axes", "size,batch,lr,threads", "--precision", "fp32", "--batch-size", "8",
        "--seq-length", "32", "--preset", "tiny", "--max-bytes", "5M", "--threads", "1",
    ]  # fmt: skip
    ended_after_trials(9)
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "000 0:06    default: 2.000 bits/char, whole run expected 1.810" in shown
    assert "learning rate x 2: failed: the loss is NaN" in shown
    assert "; best so far" in shown
    assert re.search("^dashboard +optuna-dashboard sqlite:///search/study.db$", shown, re.MULTILINE)
    assert main([*words, "--resume", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {trial["options"]["batch_size"] for trial in facts["trials"]} == {8}
    assert facts["best"]["options"]["learning_rate"] <= 0.005
    command = shlex.split(facts["command"])
    assert command[:3] == ["fastlstm", "train", str(text)]
    assert "--budget 6s" in facts["command"]
    assert main(command[1:]) == 0
    config = ["train", str(text), "--config", "search/config.yaml", "--out", "second"]
    assert main(config) == 0
    stored = optuna.storages.RDBStorage("sqlite:///search/study.db")
    study = optuna.load_study(study_name="tune", storage=stored)
    assert study.best_value == facts["best"]["expected"]
    stored.engine.dispose()
    assert len(list(Path("search/trials").iterdir())) == len(facts["trials"])


@pytest.mark.usefixtures("hang_up_at_default")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_timing_ends_the_search(text, tmp_path, monkeypatch, capsys, number):
    prepare = TextJob.prepare

    def interrupted(*args):
        os.kill(os.getpid(), number)
        return prepare(*args)

    monkeypatch.setattr(TextJob, "prepare", interrupted)
    of_options(monkeypatch, lambda *_: pytest.fail("the search went on"))
    assert main(["tune", str(text), "--out", str(tmp_path / "search"), *WORDS]) == 75
    assert "stopped; 0 finished short runs kept in" in capsys.readouterr().err


def test_a_stopped_search_says_how_to_continue(
    text, tmp_path, ended_after_trials, monkeypatch,
    capsys,
):  # fmt: skip
    trained: list[Path] = []

    def short_run(options, seconds, seed, out):
        trained.append(out)
        if len(trained) == 2:
            raise Stopped("stopped at step 3")
        return 2.0, 1.8

    of_options(monkeypatch, short_run)
    ended_after_trials(4)
    out = tmp_path / "search"
    words = ["tune", str(text), "--out", str(out), *WORDS]
    assert main(words) == 75
    said = capsys.readouterr().err
    assert f"stopped; 1 finished short run kept in {out}, continue with `--resume`" in said
    assert main([*words, "--resume"]) == 0
    shown = capsys.readouterr().out
    assert "\n000 " not in f"\n{shown}", "what has ended is not shown again"
    assert re.search("^best +default: 1.800 bits/char expected", shown, re.MULTILINE)


def test_without_optuna_one_line_says_what_to_install(text, tmp_path, monkeypatch, capsys):
    for name in ("fastlstm.tuning.study", "fastlstm.tuning.tune"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(sys.modules["fastlstm.tuning"], "study")
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["tune", str(text), "--out", str(tmp_path / "search"), *WORDS]) != 0
    said = capsys.readouterr().err
    assert said == "fastlstm: error: tune needs Optuna: pip install 'fastlstm[tune]'\n"


def test_a_locked_search_is_refused(text, tmp_path, capsys):
    out = tmp_path / "search"
    with locked_run(out):
        assert main(["tune", str(text), "--out", str(out), "--budget", "60s"]) == 2
    assert "is in use by process" in capsys.readouterr().err


def end_of(bits, steps):
    return {
        "units": steps * 1000, "step": steps, "best_bits_per_char": bits, "elapsed_s": 6.0,
        "spent_s": {"setup": 1.0},
    }  # fmt: skip


SPACE = Space(BASE, {}, [], [], 60_000.0)
START: dict[str, Any] = {
    "model": {"rnn_size": 96, "num_layers": 1}, "num_units": {"train": 10**6},
}  # fmt: skip


def test_a_run_of_the_whole_budget_needs_no_prediction():
    job = TextJob()
    assert job.result(START, end_of(2.5, 300), BASE, SPACE, 5.0, 5.0) == (2.5, 2.5)
    measured, expected = job.result(START, end_of(2.5, 300), BASE, SPACE, 5.0, 21.0)
    assert measured == 2.5
    assert expected == whole_run_bits(START, end_of(2.5, 300), BASE, SPACE, (4.0, 20.0))
    assert 2.0 < expected < 2.3


def test_a_higher_rate_gains_less_in_a_longer_run():
    higher = {**BASE, "learning_rate": 2 * BASE["learning_rate"]}
    lengths_s = 1.0, 561 / 134
    default = whole_run_bits(START, end_of(2.856, 134), BASE, SPACE, lengths_s)
    gain = 1.0 - whole_run_bits(START, end_of(2.740, 134), higher, SPACE, lengths_s) / default
    assert 0.005 < gain < 0.02  # 4.1 % in the short run, 1.2 % in the whole one (benchmarks/log)


def test_the_law_is_corrected_by_the_default():
    # Measured (benchmarks/log): 128 units with AdamW at 1.8 and 6 s, and what they ended at.
    default = Space({**BASE, "batch_size": 32, "seq_length": 64}, {}, [], [], 191_500.0)
    for batch, steps, short, whole in ((32, 160, 2.723, 2.358), (16, 289, 2.697, 2.330)):
        options = {**default.options, "optimizer": "adamw", "learning_rate": 0.008,
                   "rnn_size": 128, "batch_size": batch}  # fmt: skip
        model = {"rnn_size": 128, "num_layers": 1}
        start = {"model": model, "num_units": {"train": 1_003_854}}
        end = {**end_of(short, steps), "units": steps * batch * 64}
        expected = whole_run_bits(start, end, options, default, (1.8, 6.0))
        assert expected == pytest.approx(whole, rel=0.02)


def test_without_the_law_runs_are_compared_by_their_result():
    job = TextJob(has_law=False)
    assert job.result(START, end_of(2.5, 300), BASE, SPACE, 5.0, 50.0) == (2.5, 2.5)
    assert (job.ending, TextJob().ending) == (" of its longest run", " expected")


def test_a_refused_directory_stays_unchanged(text, tmp_path):
    out = tmp_path / "own files"
    out.mkdir()
    (out / "letter.txt").write_text("dear")
    assert main(["tune", str(text), "--out", str(out), "--budget", "60s"]) == 2
    assert [path.name for path in out.iterdir()] == ["letter.txt"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--budget", "60s", "--tune-time", "9s"], "expected at least 1:30"),
        (["--steps", "10"], "tune needs a budget"),
        (["--axes", "sise"], "did you mean 'size'"),
        (["--axes", "output-rank"], "--axes output-rank leaves nothing to try"),
        (["--axes", "lr", "--learning-rate", "0.01"], "--axes lr leaves nothing to try"),
        (["--max-latency", "5"], "expected a time above 0 such as 500us"),
        (["--seeds", "0"], "expected 1 to 100"),
        (["--budget", "60s", "--max-bytes", "1k"], "no size keeps the limits"),
    ],
)
def test_bad_input_is_refused(text, tmp_path, words, said, capsys):
    assert main(["tune", str(text), "--out", str(tmp_path / "search"), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_small_gain_is_called_not_proven(tmp_path):
    def printed(expected):
        best = {"label": "adamw", "expected": expected, "default_expected": 2.0}
        found = {"best": best, "default": {"sizes": []}, "trials": [], "importance": {}}
        return dict(rows(found, TextJob(), "", tmp_path))["best"]

    assert printed(1.99) == (
        "adamw: 1.990 bits/char expected (default 2.000, -0.5 %; not proven: it may be chance)"
    )
    assert printed(1.9).endswith("(default 2.000, -5.0 %)")
