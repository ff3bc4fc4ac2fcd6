"""Trackers as callbacks: what they get, that none ends a run, and that each reads a run back."""

import copy
import importlib.util
import json
import struct
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastlstm
from fastlstm.cli.main import main
from fastlstm.errors import CorruptFileError, MissingExtraError
from fastlstm.system import ceilings
from fastlstm.training import loggers
from fastlstm.training.callbacks import Callback
from fastlstm.training.checkpoint import RunSnapshots, find_checkpoint
from fastlstm.training.loggers import LOGGERS, TrackerLogger
from linear_task import LinearTask, of_kind, trainer_of
from series_frames import long_table

SECRET = "hush-hush-0123456789"
Events = list[dict[str, Any]]


class Kept(TrackerLogger):
    """A tracker that keeps what it gets; `fails` names the method that fails."""

    package = "json"

    def __init__(self, fails="", **names):
        super().__init__(**names)
        self.fails = fails
        self.opened: list[Any] = []
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.ends: list[str] = []

    def _fails(self, method):
        if self.fails == method:
            raise RuntimeError(f"no connection with key {SECRET}\nand more")

    def _open(self, library, project, name, configuration):
        self._fails("open")
        self.opened.append((self._id, self._is_resumed, project, name, configuration))
        return f"https://somewhere/{SECRET}"

    def _log(self, step, row):
        self._fails("log")
        self.rows.append((step, row))

    def _close(self):
        self._fails("close")
        self.ends.append(self._end)


class Says(Callback):
    """Emits a sample with a secret."""

    def on_begin(self, trainer):
        trainer.emit({"event": "sample", "step": 0, "text": f"the key is {SECRET}"})


@pytest.fixture(autouse=True)
def _secret(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", SECRET)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)


def warnings_of(events):
    return [e["text"] for e in of_kind(events, "message") if e["level"] == "warning"]


def test_a_tracker_gets_every_figure_and_no_secret():
    kept, events = Kept(name="mine"), Events()
    trainer_of(LinearTask(), events, callbacks=[kept, Says()], run_path="runs/book").fit()
    ((identity, is_resumed, project, name, configuration),) = kept.opened
    assert (len(identity), is_resumed, project, name) == (12, False, "fastlstm", "mine")
    assert configuration["learning_rate"] == 0.05
    assert (configuration["task"], configuration["num_parameters"]) == ("linear", 4)
    losses = [(e["step"], e["loss"]) for e in of_kind(events, "step")]
    assert [(s, r["train/loss"]) for s, r in kept.rows if "train/loss" in r] == losses
    valid = [(e["step"], e["loss"]) for e in of_kind(events, "eval")]
    assert [(s, r["valid/loss"]) for s, r in kept.rows if "valid/loss" in r] == valid
    assert kept.rows[0] == (0, {"sample": "the key is ***"})
    assert kept.rows[-1][1]["end/best_loss"] == min(loss for _, loss in valid)
    values = [value for _, row in kept.rows[1:] for value in row.values()]
    assert {type(value) for value in values} == {float}
    assert kept.ends == ["10 steps"]
    told = [e["text"] for e in of_kind(events, "message")]
    assert told == ["Kept: https://somewhere/***"]


@pytest.mark.parametrize("method", ["open", "log", "close"])
def test_a_failing_tracker_warns_once_and_the_run_goes_on(method):
    kept, events = Kept(method), Events()
    result = trainer_of(LinearTask(), events, callbacks=[kept]).fit()
    assert result.steps == 10
    assert warnings_of(events) == [
        "Kept stopped: RuntimeError: no connection with key ***; the run continues without it"
    ]


def test_a_tracker_that_hangs_does_not_hold_the_run(monkeypatch):
    monkeypatch.setattr(loggers, "_CLOSE_S", 0.05)
    may_go_on, events = threading.Event(), Events()

    class Hanging(Kept):
        def _log(self, step, row):
            may_go_on.wait(60)

    assert trainer_of(LinearTask(), events, callbacks=[Hanging()]).fit().steps == 10
    assert "had not sent everything 0.05 s after the end" in warnings_of(events)[0]
    events.clear()
    monkeypatch.setattr(loggers, "_MAX_WAITING", 2)
    assert trainer_of(LinearTask(), events, callbacks=[Hanging()]).fit().steps == 10
    assert len(warnings_of(events)) == 1
    assert "2 rows wait for it" in warnings_of(events)[0]
    may_go_on.set()


def test_a_resumed_run_has_the_same_id_and_a_new_one_another(run):
    kept, store = Kept(), RunSnapshots(run, 2)
    trainer_of(LinearTask(), callbacks=[kept], snapshots=store).fit()
    checkpoint, _ = find_checkpoint(run)
    assert checkpoint is not None
    for logger in (kept, Kept()):
        trainer_of(LinearTask(), callbacks=[logger], snapshots=store, steps=20).fit(checkpoint)
    trainer_of(LinearTask(), callbacks=[kept]).fit()
    ids = [(identity, is_resumed) for identity, is_resumed, *_ in kept.opened]
    first = ids[0][0]
    assert ids[:2] == [(first, False), (first, True)]
    assert ids[2][0] != first
    assert logger.opened[0][:2] == (first, True)
    with pytest.raises(CorruptFileError, match="12 hexadecimal digits"):
        Kept().load_state_dict({"id": "' OR 1=1"})


def test_a_run_that_fails_is_not_reported_as_done():
    class Failing(Callback):
        def on_evaluate(self, trainer, metrics):
            raise ValueError("mine")

    kept = Kept()
    with pytest.raises(ValueError, match="mine"):
        trainer_of(LinearTask(), callbacks=[kept, Failing()]).fit()
    assert kept.ends == [""]


def test_tables_and_sequences_are_logged_too(tmp_path):
    table, sequences = Kept(), Kept()
    fast = {"device": "cpu", "precision": "fp32", "threads": 1, "steps": 4, "log_every": 1}
    columns = {"target": "y", "time": "ds", "series": "unique_id"}
    model = fastlstm.Forecaster(
        horizon=4, input_size=16, hidden_size=8, callbacks=[table], **columns, **fast
    )
    copied = copy.deepcopy(model)  # as scikit-learn's clone does
    model.fit(long_table(80, temp=None))
    rng = np.random.default_rng(0)
    X = [rng.normal(size=(6, 2)) for _ in range(40)]
    fastlstm.SequenceClassifier(hidden_size=6, callbacks=[sequences], **fast).fit(X, [0, 1] * 20)
    for logger, task in ((table, "forecast"), (sequences, "sequence")):
        assert logger.opened[0][-1]["task"] == task
        assert any("train/loss" in row for _, row in logger.rows)
        assert logger.ends == ["4 steps"]
    assert not copied.get_params()["callbacks"][0].opened


@pytest.mark.parametrize("name", LOGGERS)
def test_a_missing_package_is_named(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'fastlstm\[{name}\]'"):
        LOGGERS[name]()


def test_a_folder_named_like_a_tracker_is_not_its_package(tmp_path, monkeypatch):
    (tmp_path / "wandb_").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(Kept, "package", "wandb_")
    with pytest.raises(MissingExtraError, match="only a folder of that name"):
        Kept()


def test_the_flag_takes_several_trackers(monkeypatch, tmp_path, capsys):
    given: list[Any] = []
    monkeypatch.setattr("fastlstm.text.train.train", lambda *_, **more: given.append(more))
    monkeypatch.setattr(loggers, "LOGGERS", dict.fromkeys(LOGGERS, Kept))
    (tmp_path / "book.txt").write_text("a text " * 99)
    words = ["train", str(tmp_path / "book.txt"), "--out", str(tmp_path / "run")]
    more = ["--log", "wandb", "--log", "mlflow", "--log", "wandb", "--alert", "true"]
    assert main([*words, *more]) == 0
    kinds = [type(callback).__name__ for callback in given[0]["callbacks"]]
    assert kinds == ["Kept", "Kept", "Alerts"]
    assert main([*words, "--log", "comet"]) == 2
    assert "--log is 'comet', expected one of wandb, mlflow, trackio" in capsys.readouterr().err


# The trackers themselves: a run, resumed once, is read back by each one's own reader. ------------


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Trains six steps and, resumed, six more, logged to every tracker that is installed; yields
    the directory of the trackers' files, and the events."""
    folder, events = tmp_path_factory.mktemp("logged"), Events()
    (folder / "book.txt").write_text("the quick brown fox jumps over the lazy dog; why?\n" * 80)
    installed = [kind for name, kind in LOGGERS.items() if importlib.util.find_spec(name)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "TRACKIO_SPACE_ID"):
            patch.delenv(name, raising=False)
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("MLFLOW_TRACKING_URI", (folder / "mlruns").as_uri())
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        found = ceilings.Ceilings(1e6, "torch.mm", 1e6)
        patch.setattr(ceilings, "_measure", lambda *_: found)
        patch.setattr(loggers, "_CLOSE_S", 3600.0)  # a busy machine takes its time
        for steps in (6, 12):
            fastlstm.train(
                "book.txt", out="runs/book", steps=steps, resume=steps > 6, rnn_size=16,
                embed_size=8, batch_size=4, seq_length=16, eval_every=3, sample_every=6,
                log_every=1, device="cpu", precision="fp32", threads=1, cache_dir="cache",
                callbacks=[kind(project="books") for kind in installed], observers=[events.append],
            )  # fmt: skip
        if wandb := sys.modules.get("wandb"):
            wandb.teardown()  # `finish` does not wait for the file, the end of W&B's process does
        yield folder, events
    assert not warnings_of([e for e in events if "Logger" in str(e.get("text"))])


def expected(events, kind, key):
    return [(e["step"], e[key]) for e in of_kind(events, kind)]


def wandb_records(path):
    """Yields the records of a .wandb file: blocks of 32 KiB as LevelDB's log, of which W&B has no
    reader in Python any more."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = path.read_bytes(), 7, b""
    while at < len(data):
        if 32_768 - at % 32_768 < 7:
            at += 32_768 - at % 32_768
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


@pytest.mark.filterwarnings("ignore")
def test_wandb_reads_the_run_back(logged):
    pytest.importorskip("wandb")
    folder, events = logged
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    records = [record for file in files for record in wandb_records(file)]
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert len(files) == 2
    assert {(run.run_id, run.display_name, run.project) for run in runs} == {
        (runs[0].run_id, "book", "books")
    }
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert (config["rnn_size"], config["task"]) == (16, "text")
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json)
         for item in record.history.item}
        for record in records if record.WhichOneof("record_type") == "history"
    ]  # fmt: skip
    for kind, key in (("step", "train/loss"), ("eval", "valid/loss")):
        found = [(row["step"], row[key]) for row in rows if key in row]
        assert found == expected(events, kind, "loss")
    samples = [(row["step"], row["sample"]) for row in rows if "sample" in row]
    assert samples == expected(events, "sample", "text")
    axes = [r.metric for r in records if r.WhichOneof("record_type") == "metric"]
    assert {(axis.glob_name, axis.step_metric) for axis in axes} >= {("*", "step")}
    exits = [r.exit.exit_code for r in records if r.WhichOneof("record_type") == "exit"]
    assert exits == [0, 0]


@pytest.mark.filterwarnings("ignore")
def test_mlflow_reads_the_run_back(logged):
    mlflow = pytest.importorskip("mlflow")
    _, events = logged
    client = mlflow.MlflowClient()
    place = client.get_experiment_by_name("books").experiment_id
    (run,) = client.search_runs([place])
    assert (run.info.run_name, run.info.status) == ("book", "FINISHED")
    assert (run.data.params["rnn_size"], run.data.params["task"]) == ("16", "text")
    for kind, key in (("step", "train/loss"), ("eval", "valid/loss")):
        history = client.get_metric_history(run.info.run_id, key)
        found = sorted((metric.step, metric.value) for metric in history)
        assert found == expected(events, kind, "loss")
    for step, text in expected(events, "sample", "text"):
        where = client.download_artifacts(run.info.run_id, f"samples/{step:08d}.txt")
        assert Path(where).read_text("utf-8") == text


@pytest.mark.filterwarnings("ignore")
def test_trackio_reads_the_run_back(logged):
    trackio = pytest.importorskip("trackio")
    _, events = logged
    (run,) = trackio.Api().runs("books")
    assert run.name.startswith("book-")
    assert run.config["rnn_size"] == 16
    rows = trackio.SQLiteStorage.get_logs("books", run.name)
    for kind, key in (("step", "train/loss"), ("eval", "valid/loss")):
        found = sorted((row["step"], row[key]) for row in rows if key in row)
        assert found == expected(events, kind, "loss")
