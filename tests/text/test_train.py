"""`fastlstm.train` end to end on a tiny text: resume, accumulation, trouble, stop."""

import errno
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fastlstm
from fastlstm.cli.main import main
from fastlstm.errors import (
    BudgetError,
    ConfigError,
    DataError,
    FormatError,
    NonFiniteError,
    RunDirectoryError,
    Stopped,
)
from fastlstm.report.lines import end_notes
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system import hardware, storage
from fastlstm.text import task as task_module
from fastlstm.text.model import LanguageModel
from fastlstm.training import trainer as trainer_module
from fastlstm.training.schedule import EvaluationSchedule, StopCriterion
from fastlstm.training.state import Progress
from simulated_disk import FailingOs

TINY = {
    "rnn_size": 24, "embed_size": 12, "batch_size": 4, "seq_length": 16, "precision": "fp32",
    "threads": 1, "tensorboard": False, "sample_every": 0, "device": "cpu", "dropout": 0.2,
    "ema": 0.9, "eval_every": 7,
}  # fmt: skip


def write_text(path):
    path.write_text(
        "the quick brown fox jumps over the lazy dog; \nwhy does it always do that?\n" * 60
    )
    return path


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "book.txt")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was not stopped."""
    folder = tmp_path_factory.mktemp("unstopped")
    return train(write_text(folder / "book.txt"), folder / "whole").path


def newest(run):
    return max(run.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))


def events_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def logged(run):
    kinds = ("step", "eval")
    return [(e["event"], e["step"], e["loss"]) for e in events_of(run) if e["event"] in kinds]


def assert_same_state(left, right):
    for file in sorted(left.glob("*.safetensors")):
        a, b = load_file(file), load_file(right / file.name)
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), f"{file.name}:{name}"


class StopAt:
    """Observer that sends this process a signal when an event of a kind comes at a step."""

    def __init__(self, kind, step):
        self.kind, self.step = kind, step

    def __call__(self, event):
        if event["event"] == self.kind and event["step"] == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def train(text, out, *observers, **fields):
    ends = {"steps": 20} if "budget" not in fields else {}
    return fastlstm.train(
        text, out=out, observers=observers, **{**TINY, **ends, "log_every": 1, **fields}
    )


@pytest.mark.isa
@pytest.mark.parametrize("step", [1, 6, 7, 13, 19])
def test_a_stopped_run_ends_bit_equal(text, tmp_path, whole, step):
    with pytest.raises(Stopped, match="SIGTERM; checkpoint-"):
        train(text, tmp_path / "parts", StopAt("step", step))
    train(text, tmp_path / "parts", resume=True)
    assert_same_state(newest(whole), newest(tmp_path / "parts"))
    assert logged(whole) == logged(tmp_path / "parts"), "no gap and no line twice"


def test_what_torch_was_set_to_stays(text, tmp_path):
    switches = torch.backends.cuda.matmul, torch.backends.cudnn
    threads, before = torch.get_num_threads(), [switch.allow_tf32 for switch in switches]
    try:
        for is_on in (True, False):
            for switch in switches:
                switch.allow_tf32 = is_on
            train(text, tmp_path / str(is_on), steps=2, threads=threads + 1)
            with pytest.raises(ConfigError):
                train(text, tmp_path / "refused", steps=2, threads=threads + 2, precision="fp16")
            assert [switch.allow_tf32 for switch in switches] == [is_on, is_on]
            assert torch.get_num_threads() == threads
    finally:
        for switch, is_on in zip(switches, before, strict=True):
            switch.allow_tf32 = is_on


@pytest.mark.parametrize("place", ["prepare_text", "budget_plan", "initialize"])
def test_ctrl_c_in_set_up_leaves_nothing(text, tmp_path, monkeypatch, capfd, place):
    """It waited for the end of the set-up, up to half a minute."""
    monkeypatch.setattr(
        f"fastlstm.text.train.{place}", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)
    )
    words = ["--preset", "tiny", "--steps", "3", "--cache-dir", str(tmp_path / "cache")]
    assert main(["train", str(text), "--out", str(tmp_path / "run"), *words]) == 130
    assert capfd.readouterr().err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_stop_in_an_evaluation_saves_and_evaluates_again(text, tmp_path, whole, monkeypatch):
    evaluate = task_module.lane_nats

    def interrupted(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(task_module, "lane_nats", interrupted)
    with pytest.raises(Stopped):
        train(text, tmp_path / "parts")
    assert newest(tmp_path / "parts").name == "checkpoint-7"
    monkeypatch.setattr(task_module, "lane_nats", evaluate)
    train(text, tmp_path / "parts", resume=True)
    assert_same_state(newest(whole), newest(tmp_path / "parts"))


@pytest.mark.isa
def test_accumulation_equals_the_big_batch(text, tmp_path):
    losses = []
    for name, fields in {
        "parts": {"batch_size": 2, "accumulate": 4},
        "whole": {"batch_size": 8},
    }.items():
        events: list[dict] = []
        # Muon's bf16 iteration would enlarge a rounding of the sums ten thousand times.
        fields |= {"dropout": 0.0, "steps": 12, "optimizer": "sgd"}
        train(text, tmp_path / name, events.append, **fields)
        losses.append([e["loss"] for e in events if e["event"] == "step"])
    assert len(losses[0]) == 12
    assert losses[0][-1] < losses[0][0] - 0.1
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def plant(monkeypatch, when, plant_in):
    """Calls `plant_in(model)` before the forward passes whose number is in `when`."""
    loss, count = LanguageModel.loss, [0]

    def planted(self, *args, **kwargs):
        if self.training and torch.is_grad_enabled():
            count[0] += 1
            if count[0] in when:
                result = plant_in(self, lambda: loss(self, *args, **kwargs))
                if result is not None:
                    return result
        return loss(self, *args, **kwargs)

    monkeypatch.setattr(LanguageModel, "loss", planted)


def skips(run):
    return [e for e in events_of(run) if e["event"] == "skip"]


def test_nan_in_the_carried_state_does_not_stay(text, tmp_path, monkeypatch):
    def bad(model, run):
        total, (h, c) = run()
        return total * float("nan"), (h * float("nan"), c)

    plant(monkeypatch, {9}, bad)
    run = train(text, tmp_path / "run", lane_reset=0.0)
    assert [skip["tensor"] for skip in skips(run.path)] == ["carried h"]


def test_the_parts_of_a_resumed_run_add_up(text, tmp_path):
    began = time.perf_counter() - 30.0
    with pytest.raises(Stopped):  # a start whose set-up took 30 s
        train(text, tmp_path / "run", StopAt("step", 5), began=began)
    end = events_of(train(text, tmp_path / "run", resume=True).path)[-1]
    parts_s = end["train_s"] + sum(end["spent_s"].values())
    assert 30.0 < end["spent_s"]["setup"] < parts_s <= end["elapsed_s"]


def test_a_roll_back_keeps_what_evaluations_took_and_what_they_score(text, tmp_path, monkeypatch):
    evaluate, scored, poisoned = task_module.lane_nats, [], []

    def bad(model, run):
        if scored and not poisoned:  # after the first evaluation
            poisoned.append(True)
            with torch.no_grad():
                model.output.bias[0] = float("nan")

    def slow_at_first(model, ids, *args, **kwargs):
        time.sleep(0.0 if scored else 0.5)
        scored.append(len(ids) - 1)
        return evaluate(model, ids, *args, **kwargs)

    plant(monkeypatch, range(10**6), bad)
    monkeypatch.setattr(task_module, "lane_nats", slow_at_first)
    monkeypatch.setattr(EvaluationSchedule, "limit", lambda *_: 100 + len(scored))
    run = train(text, tmp_path / "run", checkpoint_every=100)
    assert len(skips(run.path)) == 1
    assert scored == [100] * 4
    assert events_of(run.path)[-1]["spent_s"]["evaluations"] > 0.5


def test_a_budget_that_set_up_used_up_is_no_finished_run(text, tmp_path):
    events: list[dict] = []
    began = time.perf_counter() - 5.0
    with pytest.raises(BudgetError, match="trained 0 steps: the budget was too small for set-up"):
        train(text, tmp_path / "run", events.append, began=began, budget="5s")
    assert not any(event["event"] in ("end", "eval", "sample", "checkpoint") for event in events)
    run = RunDirectory(tmp_path / "run")
    assert not run.has_published()
    assert not run.report_path.exists()
    assert "trained 0 steps" in events_of(tmp_path / "run")[-1]["reason"]
    assert train(text, tmp_path / "run").bits_per_char < 6  # the place is free for a longer run


@pytest.mark.usefixtures("rests_between_steps")
def test_a_budget_is_planned_with_what_set_up_and_an_evaluation_take(text, tmp_path):
    events: list[dict] = []
    fields = {"budget": "36s", "eval_every": 10**9, "began": time.perf_counter() - 30.0}
    train(text, tmp_path / "run", events.append, **fields)
    kinds = [event["event"] for event in events if event["event"] in ("step", "eval")]
    assert "step" in kinds[kinds.index("eval") :]
    assert kinds.count("eval") == 2  # one half-way, one at the end
    first = next(event for event in events if event["event"] == "step")
    assert first["progress"] < 0.3, "the schedule begins when set-up is over"
    assert first["elapsed_s"] > 30.0
    end = events[-1]
    assert end["spent_s"]["setup"] > 30.0
    assert end["train_s"] + sum(end["spent_s"].values()) <= end["elapsed_s"]


@pytest.mark.usefixtures("rests_between_steps")
def test_a_resumed_run_whose_budget_is_used_is_no_finished_run(text, tmp_path):
    run = tmp_path / "run"
    train(text, run, began=time.perf_counter() - 30.0, budget="36s")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    events: list[dict] = []
    with pytest.raises(BudgetError, match="trained 0 further steps: the run has used its budget"):
        train(text, run, events.append, resume=True, budget="36s")
    assert not any(event["event"] in ("end", "eval", "checkpoint") for event in events)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    began = time.perf_counter() - 30.0  # set-up takes more than the further second
    with pytest.raises(BudgetError, match="has used its budget 37s; give a larger `budget`"):
        train(text, run, resume=True, began=began, budget="37s")
    end = events_of(run)[-1]
    assert (end["event"], "trained 0 further steps" in end["reason"]) == ("end", True)


def test_too_many_threads_are_said_before_anything_is_read_or_measured(text, tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "cores", lambda: 1)
    events: list[dict] = []
    train(text, tmp_path / "run", events.append, threads=2, steps=1)
    said = "2 threads share the 1 core of this process, which is slower than one thread for each"
    assert events[0] == {"event": "message", "level": "warning", "text": said}
    assert [event.get("text") for event in events_of(tmp_path / "run")].count(said) == 1


def test_a_resumed_run_that_took_all_its_steps_says_so(text, tmp_path):
    run = train(text, tmp_path / "run")
    events: list[dict] = []
    train(text, run.path, events.append, resume=True, sync_every=2)
    assert not any(event["event"] == "step" for event in events)
    said = [event["text"] for event in events if event["event"] == "message"]
    assert sum(text.startswith("already complete: it ends after") for text in said) == 1
    assert [e["precision_why"] for e in events if e["event"] == "start"] == ["as asked"]


class Disk:
    """Observer that puts `disk` in the place of the true one from one event to another."""

    def __init__(self, monkeypatch, disk, first, last):
        self.patch, self.disk, self.first, self.last = monkeypatch, disk, first, last
        self.warnings: list[str] = []

    def __call__(self, event):
        about = (event["event"], event.get("step"))
        if about == self.first:
            self.patch.setattr(storage, "os", self.disk)
        elif about == self.last:
            self.patch.setattr(storage, "os", os)
        elif event["event"] == "message" and event["level"] == "warning":
            self.warnings.append(event["text"])


@pytest.fixture
def best_is_first(monkeypatch):
    """Makes the first evaluation of a run the best one."""
    evaluate, calls = task_module.lane_nats, []

    def worse(model, ids, *args, **kwargs):
        calls.append(1)
        nats = evaluate(model, ids, *args, **kwargs)
        return nats + len(calls) * len(ids) / len(nats)

    monkeypatch.setattr(task_module, "lane_nats", worse)


WITH_DISK = {"steps": 9, "eval_every": 5, "checkpoint_every": 3}


def same_model(left, right):
    a, b = (load_file(path / "model.safetensors") for path in (left, right))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.usefixtures("best_is_first")
@pytest.mark.parametrize("last", [("step", 6), ("step", 8)])
def test_a_best_model_that_met_a_full_disk_is_published_later(text, tmp_path, monkeypatch, last):
    train(text, tmp_path / "whole", **WITH_DISK)
    full = FailingOs(Path("/"), 1, errno.ENOSPC, lasting=True)
    disk = Disk(monkeypatch, full, ("step", 4), last)
    run = train(text, tmp_path / "run", disk, **WITH_DISK)
    assert any("the best model is not published yet" in text for text in disk.warnings)
    assert same_model(run.path, tmp_path / "whole")


def test_the_averaged_weights_are_published_and_write_the_samples(text, tmp_path, monkeypatch):
    written: list[torch.Tensor] = []

    class Keep(fastlstm.Callback):
        def on_end(self, trainer):
            self.bias = trainer.model.output.bias.clone()
            self.average = trainer.state.average.tensors()["output.bias"].clone()

    keep = Keep()
    monkeypatch.setattr(
        "fastlstm.text.task.sample_text",
        lambda model, *_: written.append(model.output.bias.clone()) or "",
    )
    fields = {"ema": 0.9, "steps": 3, "eval_every": 1000, "sample_every": 1}
    run = train(text, tmp_path / "run", callbacks=[keep], **fields)
    published = load_file(run.path / "model.safetensors")["output.bias"]
    assert torch.equal(written[0], published)
    assert torch.equal(keep.average, published)
    assert not torch.equal(keep.bias, published)


def test_a_sample_that_outgrows_float32_does_not_end_the_run(text, tmp_path, monkeypatch):
    def grown(*_: object) -> str:
        raise NonFiniteError("not finite")

    monkeypatch.setattr("fastlstm.text.task.sample_text", grown)
    events: list[dict[str, object]] = []
    train(text, tmp_path / "run", events.append, sample_every=1)
    assert any(str(event.get("text")).startswith("no sample: ") for event in events)
    assert events[-1]["event"] == "end"


def test_refusals(text, tmp_path):
    run = train(text, tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="already contains a run"):
        train(text, tmp_path / "run")
    with pytest.raises(ConfigError, match="`rnn_size=25`: this run was started with 24"):
        train(text, tmp_path / "run", resume=True, rnn_size=25)
    with pytest.raises(ConfigError, match="`num_layers=3`: this run was started without it; leave"):
        train(text, tmp_path / "run", resume=True, num_layers=3)
    other = tmp_path / "other.txt"
    other.write_text(text.read_text() + "one more line\n")
    with pytest.raises(FormatError, match=rf"started with {text} \([\d,]+ characters\), not with"):
        train(other, tmp_path / "run", resume=True)
    other.write_text("characters that are not in the vocabulary: ☃ " * 99)
    with pytest.raises(FormatError, match=rf"started with {text} .*not with {other}; resume with"):
        train(other, tmp_path / "run", resume=True)
    with pytest.raises(DataError, match=r"no such file or directory: .*book\.tx"):
        train(str(text)[:-1], tmp_path / "run")  # not that a run is there already
    longer = train(text, tmp_path / "run", resume=True, steps=25)
    assert newest(longer.path).name == "checkpoint-25"
    assert run.path == longer.path
    text.write_text(text.read_text() + "one more line\n")
    with pytest.raises(FormatError, match=rf"started with {text} .*changed since"):
        train(text, tmp_path / "run", resume=True, steps=30)


def test_a_table_is_no_text_unless_it_is_said(tmp_path):
    table, out = tmp_path / "sales.csv", tmp_path / "run"
    table.write_text("day,sold\n" + "".join(f"2024-01-{1 + n % 28:02},{n}\n" for n in range(400)))
    with pytest.raises(DataError, match=r"sales\.csv holds a table: fastlstm\.Forecaster"):
        train(table, out)
    assert not out.exists()
    with pytest.raises(ConfigError, match="'horizon' is for a table; to train a forecaster"):
        train(table, out, horizon=24)
    with pytest.raises(ConfigError, match=r"no `verbose`; `observers=\(\)` shows nothing"):
        train(table, out, verbose=False)
    train(table, out, steps=1, as_text=True)
    assert train(table, out, steps=2, resume=True).bits_per_char > 0


def test_of_a_budget_the_report_has_its_time_and_evaluations_a_tenth_of_what_set_up_left():
    progress = Progress(step=5, spent={"setup": 20.0}, scored=7)
    ending = StopCriterion("budget", None, 100.0, "budget 100s")
    task: Any = SimpleNamespace(
        num_valid=10**6, min_scored=10_000, max_scored=None,
        finish_s=lambda unit_s: 20.0,
    )  # fmt: skip
    assert EvaluationSchedule(7, 16, ending).limit(task, progress, unit_s=1e-4) == 80_000
    trainer: Any = SimpleNamespace(
        progress=progress,
        plan=SimpleNamespace(stop_criterion=ending),
        elapsed_s=lambda: 45.0,
        task=task,
        meter=SimpleNamespace(unit_s=1.0, evaluation_s=0.0, save_s=2.5, seconds_per_step=0.0),
    )  # fmt: skip
    reserve_s = 7 + 2.5 + trainer_module.CLOSING_S + 20
    assert trainer_module.Trainer.done(trainer) == pytest.approx(25 / (80 - reserve_s))
    trainer.meter.evaluation_s = 17.0
    assert trainer_module.Trainer.done(trainer) == pytest.approx(25 / (80 - reserve_s - 10))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("to be or not to be, " * 15, "far too short: 270 training tokens, 14 are scored"),
        ("a" * 5000, "one character, repeated"),
    ],
)
def test_a_text_that_teaches_nothing_is_said_at_both_ends(tmp_path, content, said):
    path = tmp_path / "short.txt"
    path.write_text(content)
    run = train(path, tmp_path / "run", steps=2, eval_every=1)
    events = events_of(run.path)
    warnings = [e["text"] for e in events if e["event"] == "message" and e["level"] == "warning"]
    notes = end_notes({**events[-1], "still_improving": True}, {})
    assert [said in text for text in warnings] == [True]
    assert [said in text for text in notes] == [True]
