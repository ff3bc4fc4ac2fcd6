"""Forecasters compressed: rounded, pruned, distilled, stopped and resumed, refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from pyarrow import parquet as pq

import fastlstm
from fastlstm import Forecaster
from fastlstm.cli.main import main
from fastlstm.compression import forecast
from fastlstm.compression.forecast import block_errors
from fastlstm.compression.pruning import prunable
from fastlstm.compression.report import bootstrap_interval
from fastlstm.errors import ConfigError, DataError, QualityError, RunDirectoryError, Stopped
from fastlstm.forecast.data.preparation import prepare
from fastlstm.forecast.data.splits import split_table
from fastlstm.forecast.files import read_forecaster
from fastlstm.forecast.table_schema import apply_schema
from fastlstm.forecast.window_forecaster import load_window_forecaster
from fastlstm.report.terminal import short_bytes
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system.measurements import CpuTimer
from fastlstm.training.checkpoint import find_checkpoint
from forecast_server import everything, output, waves
from forecast_server import tensor as tensor_of
from running_server import SETTINGS, Running
from zero_counts import zero_counts

QUICK: dict[str, Any] = {
    "horizon": 6, "input_size": 24, "patch": 6, "hidden_size": 32, "steps": 10, "dropout": 0.1,
    "learning_rate": 0.01, "split": "60/20/20", "evaluations": 2, "tensorboard": False,
    "batch_size": 16, "threads": 1, "linear": False, "calendar": "none",
}  # fmt: skip
ROLES: dict[str, Any] = {
    "past": ["temp", "sky"], "future": ["price", "kind"], "static": ["size", "place"],
    "categorical": ["kind", "place", "sky"],
}  # fmt: skip
TRAIN: dict[str, Any] = {"steps": 10, "tensorboard": False, "observers": (), "threads": 1}
KINDS: dict[str, dict[str, Any]] = {
    "point": {},
    "everything": ROLES,
    "quantiles": {**ROLES, "output": "quantiles", "linear": True},
    "bands": {"output": "quantiles"},
    "student_t": {"output": "student_t", "num_layers": 2},
    "counts": {"output": "negative_binomial"},
    "both_ways": {"bidirectional": True, "num_layers": 2},
    "streams": {"tbptt": 12, "batch_size": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sources")


def source(folder, kind="point"):
    """Returns a run of a kind, trained once on the table `<kind>.parquet` beside it."""
    path, table = folder / kind, folder / f"{kind}.parquet"
    if not path.exists():
        frame = everything() if KINDS[kind].get("past") else waves()
        if kind == "counts":
            y = np.random.default_rng(0).poisson(5, len(frame)).astype(np.float32)
            frame = frame.set_column(2, "y", pa.array(y))
        pq.write_table(frame, table)
        Forecaster(**{**QUICK, **KINDS[kind]}).fit(str(table), out=path)
    return path


def compress(run, out, **options):
    return fastlstm.compress(run, out=out, **{"observers": (), **options})


def weights_of(run):
    return {n: p.detach() for n, p in read_forecaster(run).network.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "formats"),
    [
        ("everything", ("fp16", "int8", "int4")), ("point", ("int8",)), ("quantiles", ("int4",)),
        ("student_t", ("int8",)), ("counts", ("int4",)), ("both_ways", ("int8",)),
        ("streams", ("int8",)),
    ],
)  # fmt: skip
def test_a_rounded_forecaster_is_a_run_with_the_measured_weights(folder, tmp_path, kind, formats):
    run = source(folder, kind)
    before = read_forecaster(run)
    for to in formats:
        share = {"fp16": 0.6, "int8": 0.5, "int4": 0.45}[to]
        report = compress(run, tmp_path / to, to=to)
        after = read_forecaster(tmp_path / to)
        assert report.is_published
        assert report.result.weights == to
        size = (tmp_path / to / "model.safetensors").stat().st_size
        assert size == report.result.file_bytes
        residuals = before.calibration.residuals.numel() * 4
        assert size - residuals < share * (report.source.file_bytes - residuals) + 4000
        assert after.compression is not None
        assert after.compression.weights == to
        config = json.loads((tmp_path / to / "config.json").read_bytes())
        assert config["format"] == 6
        assert config["compression"]["source"]["path"] == str(run)
        assert json.loads((tmp_path / to / "compression.json").read_bytes())["is_published"]
        assert not RunDirectory(tmp_path / to).verify()
        for name, weight in weights_of(run).items():
            scale = weight.abs().max()
            limit = {"fp16": 1e-3, "int8": 0.005, "int4": 0.08}[to]
            distance = (weights_of(tmp_path / to)[name] - weight).abs().max().item()
            assert distance <= limit * scale, name
        if before.network.output.is_calibrated:
            assert not torch.equal(after.calibration.residuals, before.calibration.residuals)
        mine = Forecaster.load(tmp_path / to).backtest("valid", frame=folder / f"{kind}.parquet")
        theirs = Forecaster.load(run).backtest("valid", frame=folder / f"{kind}.parquet")
        ratio = mine["forecaster"]["mae"] / theirs["forecaster"]["mae"] - 1
        if report.measure == "mae":
            assert report.loss == pytest.approx(ratio, abs=0.05)
        assert abs(ratio) < {"fp16": 0.001, "int8": 0.02, "int4": 0.3}[to]


def test_a_limit_on_a_table_without_targets_is_refused_before_training(tmp_path):
    def table(name, start, stop):
        frame = waves(num_series=1)
        values = frame["y"].to_pylist()
        values[start:stop] = [None] * (stop - start)
        column = pa.array(values, pa.float32())
        frame = frame.set_column(frame.column_names.index("y"), "y", column)
        pq.write_table(frame, tmp_path / name)
        return str(tmp_path / name)

    own = table("own.parquet", 3, 5)
    Forecaster(**QUICK, future=("temp",)).fit(own, out=tmp_path / "run")
    options: dict[str, Any] = {"prune": 0.5, "structured": "units", "steps": 2, "max_loss": 5.0}
    other = table("other.parquet", 70, 120)
    with pytest.raises(DataError, match=r"has no value of a target; give another .*data"):
        compress(tmp_path / "run", tmp_path / "out", data=other, **options)
    assert not RunDirectory(tmp_path / "out").checkpoints()


def test_without_its_table_a_forecaster_is_rounded_and_not_measured(tmp_path):
    Forecaster(**QUICK).fit(waves()).save(tmp_path / "saved")
    report = compress(tmp_path / "saved", tmp_path / "small", to="int8")
    assert report.change is None
    assert "does not name its table" in report.not_measured
    assert any("the intervals are those of the source" in note for note in report.notes)
    before, after = (read_forecaster(tmp_path / name) for name in ("saved", "small"))
    assert torch.equal(before.calibration.residuals, after.calibration.residuals)
    options: dict[str, Any]
    for options in ({"to": "int8", "max_loss": 0.1}, {"prune": 0.5, "structured": "units"}):
        with pytest.raises(DataError, match=r"does not name its table; give .*data"):
            compress(tmp_path / "saved", tmp_path / "other", **options)
        assert not (tmp_path / "other").exists()
    pq.write_table(waves(), tmp_path / "table.parquet")
    table = tmp_path / "table.parquet"
    report = compress(tmp_path / "saved", tmp_path / "other", to="int8", data=table)
    assert set(report.scores) == {"valid", "test"}  # it is what the run was trained on
    framed = compress(tmp_path / "saved", tmp_path / "framed", to="int8", data=waves())
    assert framed.scores == report.scores
    assert framed.change.scored_on == "the validation part of pyarrow Table"
    assert set(report.scores["test"]["result"]) == {"mse", "mae", "coverage_80", "coverage_95"}


def louder(num_rows=120):
    """Waves with errors that the intervals of the sources do not know."""
    table = waves(num_rows)
    y = table["y"].to_numpy() + np.random.default_rng(3).normal(0, 2, len(table))
    return table.set_column(2, "y", pa.array(y.astype(np.float32)))


@pytest.mark.parametrize("trains", [False, True])
def test_intervals_are_not_scored_on_their_calibration_windows(folder, tmp_path, trains):
    run, other = source(folder, "bands"), tmp_path / "other.parquet"
    pq.write_table(louder(), other)
    options: dict[str, Any] = {"to": "fp16", **(TRAIN if trains else {})}
    options |= {"steps": 1, "learning_rate": 1e-6} if trains else {}
    own = compress(run, tmp_path / "own", data=folder / "bands.parquet", **options)
    assert set(own.scores) == {"valid", "test"}
    assert not any("intervals of source and result" in note for note in own.notes)
    report = compress(run, tmp_path / "small", data=other, **options)
    assert set(report.scores) == {"test"}
    assert report.change.scored_on == f"the test part of {other}"
    assert report.notes[0] == (
        f"the intervals of source and result are calibrated on the validation part of {other} and"
        " scored on its test part"
    )
    scores = report.scores["test"]  # the networks differ by a rounding that hardly matters
    for name in ("crps", "coverage_80", "coverage_95"):
        assert scores["result"][name] == pytest.approx(scores["source"][name], rel=0.02), name
    tested = Forecaster.load(tmp_path / "small").backtest("test", frame=other, scaled=True)
    assert scores["result"]["crps"] == pytest.approx(tested["forecaster"]["crps"], rel=0.01)
    again = compress(tmp_path / "small", tmp_path / "again", to="int8")
    assert set(again.scores) == {"test"}  # its scaler is still that of the first table


@pytest.mark.filterwarnings("ignore:80 % intervals cover")
@pytest.mark.parametrize(
    ("split", "part", "name"), [("60/40/0", "valid", "validation"), ("60/10/30", "test", "test")]
)
def test_with_windows_in_one_part_the_intervals_stay(tmp_path, split, part, name):
    run, table, other = (tmp_path / n for n in ("run", "table.parquet", "other.parquet"))
    pq.write_table(waves(), table)
    pq.write_table(louder(50), other)
    Forecaster(**{**QUICK, "split": split}).fit(str(table), out=run)
    report = compress(run, tmp_path / "small", to="int8", data=other)
    assert set(report.scores) == {part}
    assert report.notes[0] == (
        "the intervals are those of the source, not calibrated anew: they are scored on the"
        f" {name} part of {other}, the only part with windows"
    )
    before, after = (read_forecaster(p).calibration.residuals for p in (run, tmp_path / "small"))
    assert torch.equal(before, after)
    if part == "test":
        pq.write_table(louder(18), other)
        with pytest.raises(DataError, match=r"valid part: .* give more rows"):
            compress(run, tmp_path / "none", to="int8", data=other)
        return
    report = compress(run, tmp_path / "trained", prune=0.5, data=other, **TRAIN)
    assert report.notes[0].startswith(f"{other} has no test part: the intervals of source and")


@pytest.mark.parametrize("kind", ["everything", "both_ways", "streams"])
def test_half_of_the_units_leave_a_smaller_forecaster(folder, tmp_path, kind):
    run, out = source(folder, kind), tmp_path / "small"
    report = compress(run, out, prune=0.4, structured="units", **TRAIN)
    assert report.training.steps == 10
    pruned = "50 % of the hidden units pruned (32 -> 16)"  # of 0.4
    assert report.methods == [pruned, f"distilled from {run}"]
    small = read_forecaster(out)
    assert small.compression is not None
    assert small.compression.about["prune"] == 0.5
    assert (small.network.config.hidden_size, small.config.hidden_size) == (16, 16)
    assert report.result.num_parameters < 0.7 * report.source.num_parameters
    table = Forecaster.load(out).predict(
        str(folder / f"{kind}.parquet"),
        future=ahead(folder / f"{kind}.parquet") if KINDS[kind].get("future") else None,
    )
    assert len(table) == 18


def ahead(path):
    """Returns future covariates for the six steps after a table."""
    table = pq.read_table(path)
    last = table.take(np.r_[114:120, 234:240, 354:360])  # of each series of 120 rows
    times = pa.array(last["ds"].to_numpy() + np.timedelta64(6, "h"))
    columns = [last["unique_id"], times, last["price"], last["kind"]]
    return pa.table(columns, ["unique_id", "ds", "price", "kind"])


@pytest.mark.parametrize("kind", ["everything", "quantiles", "counts"])
def test_a_rounded_forecaster_forecasts_evaluates_and_serves(folder, tmp_path, capsys, kind):
    out, path = tmp_path / "small", folder / f"{kind}.parquet"
    compress(source(folder, kind), out, to="int8")
    future = ahead(path) if KINDS[kind].get("future") else None
    model = Forecaster.load(out)
    given = pq.read_table(path)
    forecasts = model.predict(given, future), model.predict_quantiles(given, [0.5], future)
    table = given.slice(120, 120)  # the second of three series
    server = Running(load_window_forecaster(out), SETTINGS)
    try:
        inputs = inputs_of(load_window_forecaster(out), table, future)
        body = {"inputs": inputs, "parameters": {"quantiles": [0.5]}}
        answer = server.client.post("/v2/models/small/infer", json=body)
    finally:
        server.end()
    names = ("forecast", "y"), ("quantiles", "y-q0.5")
    for (name, column), whole in zip(names, forecasts, strict=True):
        own, served = whole.slice(6, 6), output(answer, name).ravel()
        assert own["unique_id"].to_pylist() == [table["unique_id"][0].as_py()] * 6
        assert np.isfinite(served).all()
        np.testing.assert_allclose(served, own[column].to_numpy(), rtol=1e-4, atol=1e-4)
    assert main(["evaluate", str(out), str(path), "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert np.isfinite(scores["scores"]["forecaster"]["mae"])


def inputs_of(model, table, future):
    """Returns the tensors of a request for the steps after one series."""
    names = table["unique_id"][0].as_py()
    first = table.slice(0, 1)
    tables = {"past": table.slice(len(table) - 24), "future": table, "static": first}
    tables["series"] = first
    if future is not None:
        tables["future"] = future.filter(pc.field("unique_id") == names)
    tensors = []
    for group, rows in tables.items():
        columns = getattr(model, group)
        for suffix, kind, wanted in (
            ("", "FP32", columns.numbers), ("_names", "BYTES", columns.categorical)
        ):  # fmt: skip
            values = [[rows[name][k].as_py() for name in wanted] for k in range(len(rows))]
            array = np.array(values, dtype=object if suffix else np.float32)
            if wanted:
                shaped = array if group in ("static", "series") else array[None]
                tensors.append(tensor_of(f"{group}{suffix}", shaped, kind))
    return tensors


def test_the_stored_weights_have_the_requested_zeros(folder, tmp_path):
    for structured, to in (("none", "int8"), ("blocks", "int8"), ("blocks", "fp32")):
        out = tmp_path / f"{structured}-{to}"
        report = compress(
            source(folder), out, prune=0.75, structured=structured, to=to,
            schedule="polynomial:0.1,0.5,3,2", **TRAIN,
        )  # fmt: skip
        stored = read_forecaster(out)
        for name, (zeros, number) in zero_counts(prunable(stored.network), structured).items():
            assert zeros >= round(0.75 * number), name
            if to == "fp32":
                assert zeros == round(0.75 * number), name
        note = "75 % of the weights are zero; forecasts are computed in fp32"
        assert any(note in text for text in report.notes)
        names = {n for n in RunDirectory(out).read_published()[1]}
        assert "model.safetensors" in names
        Forecaster.load(out).save(tmp_path / "again" / out.name)
        again = tmp_path / "again" / out.name / "model.safetensors"
        assert again.read_bytes() == (out / "model.safetensors").read_bytes()
    dense, blocks = (tmp_path / f"{name}-int8" / "model.safetensors" for name in ("none", "blocks"))
    assert blocks.stat().st_size < dense.stat().st_size


def test_zeros_of_a_pruned_run_stay_in_a_second_compression(folder, tmp_path):
    schedule = {"schedule": "polynomial:0.1,0.5,3,2"}
    options: dict[str, Any] = {"prune": 0.75, "structured": "blocks", **schedule, **TRAIN}
    first = compress(source(folder), tmp_path / "blocks", to="int8", **options)
    with pytest.raises(ConfigError, match="stored as int8 already"):
        compress(tmp_path / "blocks", tmp_path / "same", to="int8")
    report = compress(tmp_path / "blocks", tmp_path / "int4", to="int4")
    assert report.source.weights == "int8"
    assert report.change.scored_on == f"the validation part of {folder / 'point.parquet'}"
    for told in ("75 % of the weights are zero", "its rounded weights are the start"):
        assert any(told in note for note in report.notes)

    def about(name):
        return json.loads((tmp_path / name / "config.json").read_bytes())["compression"]

    assert (about("int4")["prune"], about("int4")["structured"]) == (0.75, "blocks")
    report = compress(tmp_path / "blocks", tmp_path / "trained", to="int8", **TRAIN)
    assert report.result.file_bytes <= first.result.file_bytes
    assert about("trained")["structured"] == "blocks"
    compress(tmp_path / "blocks", tmp_path / "student", hidden_size=16, **TRAIN)
    assert about("student")["structured"] is None


def test_a_smaller_model_has_the_source_as_teacher_and_no_dropout(folder, tmp_path):
    run = source(folder)
    taught = compress(run, tmp_path / "taught", prune=0.5, structured="units", **TRAIN)
    assert taught.methods[-1] == f"distilled from {run}"
    assert taught.training.teacher_s > 0
    assert read_forecaster(tmp_path / "taught").network.config.dropout == 0.0
    alone = compress(run, tmp_path / "alone", prune=0.5, alpha=0.0, dropout=0.2, **TRAIN)
    assert len(alone.methods) == 1
    assert alone.training.teacher_s == 0
    assert read_forecaster(tmp_path / "alone").network.config.dropout == 0.2
    zeros = compress(run, tmp_path / "zeros", prune=0.5, structured="blocks", **TRAIN)
    assert zeros.source.speed == zeros.result.speed, "the same products"
    compress(run, tmp_path / "student", hidden_size=16, **TRAIN)
    assert read_forecaster(tmp_path / "student").network.config.dropout == 0.0


def test_training_that_loses_quality_is_published_with_its_loss(folder, tmp_path):
    run, options = source(folder, "bands"), {**TRAIN, "learning_rate": 10.0}
    with pytest.raises(QualityError):
        compress(run, tmp_path / "refused", to="int4", max_loss=0.0, **options)
    assert not RunDirectory(tmp_path / "refused").has_published()
    report = compress(run, tmp_path / "out", to="int4", **options)
    assert report.methods == ["int4, trained with its rounding"]
    assert report.training.steps == 10
    plain = compress(run, tmp_path / "plain", to="int4")
    assert report.result.quality > plain.result.quality
    assert report.change.difference > plain.change.difference
    events = [json.loads(x) for x in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert events[-1]["compression"]["methods"] == report.methods


def test_the_table_of_a_compressed_run_may_be_moved(folder, tmp_path):
    run, moved, other = source(folder), tmp_path / "moved.parquet", tmp_path / "other.parquet"
    moved.write_bytes((folder / "point.parquet").read_bytes())
    pq.write_table(louder(), other)
    compress(run, tmp_path / "small", to="fp16")
    own = compress(tmp_path / "small", tmp_path / "own", to="int8", data=moved)
    assert set(own.scores) == {"valid", "test"}
    compress(tmp_path / "small", tmp_path / "elsewhere", to="int8", data=other)
    again = compress(tmp_path / "elsewhere", tmp_path / "again", to="int4", data=moved)
    assert set(again.scores) == {"test"}  # its intervals are of the other table
    moved.rename(tmp_path / "away.parquet")
    (folder / "point.parquet").rename(tmp_path / "gone.parquet")
    try:  # without a table the intervals of RUN stay
        compress(run, tmp_path / "blind", to="int8")
    finally:
        (tmp_path / "gone.parquet").rename(folder / "point.parquet")
    own = compress(tmp_path / "blind", tmp_path / "seen", to="int4", data=folder / "point.parquet")
    assert set(own.scores) == {"valid", "test"}


@pytest.mark.parametrize(("kind", "polls"), [("everything", 9), ("streams", 0), ("streams", 9)])
def test_a_stopped_compression_continues_bit_equal(folder, tmp_path, kind, polls):
    run = source(folder, kind)
    options: dict[str, Any] = {
        **TRAIN, "prune": 0.5, "structured": "blocks", "to": "int8", "distil": str(run),
        "schedule": "polynomial:0.1,0.6,3,1", "eval_every": 4, "seed": 3,
    }  # fmt: skip
    compress(run, tmp_path / "whole", **options)
    left = iter([False] * polls)
    with pytest.raises(Stopped):
        compress(run, tmp_path / "run", **options, stop=lambda: next(left, True))
    assert not RunDirectory(tmp_path / "run").has_published()
    compress(run, tmp_path / "run", **options, resume=True)
    found = (find_checkpoint(RunDirectory(tmp_path / name))[0] for name in ("whole", "run"))
    own, other = filter(None, found)
    assert own.tensors.keys() == other.tensors.keys()
    for stem, tensors in own.tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, other.tensors[stem][name]), f"{stem} {name}"
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "run")]
    assert files[0] == files[1]


def test_a_used_budget_is_published_with_a_larger_limit(folder, tmp_path):
    run, out = source(folder), tmp_path / "small"
    options: dict[str, Any] = {**TRAIN, "steps": None, "budget": "5s", "hidden_size": 16}
    events: list[dict[str, Any]] = []
    options |= {"learning_rate": 1e-6, "observers": [events.append]}
    with pytest.raises(QualityError, match="with a larger `max_loss` it publishes the model"):
        compress(run, out, **options, max_loss=0.0)
    assert events[-1]["compression"]["is_published"] is False
    assert events[-1]["has_model"] is False
    steps = int(RunDirectory(out).checkpoints()[0].name.partition("-")[2])
    report = compress(run, out, observers=(), resume=True, max_loss=900.0)
    assert report.is_published
    assert (report.training.steps, report.training.reason) == (steps, "budget 5s")


def test_a_student_has_other_sizes_and_the_source_as_teacher(folder, tmp_path):
    report = compress(
        source(folder), tmp_path / "student", hidden_size=16, num_layers=2, alpha=0.7, **TRAIN
    )
    stored = read_forecaster(tmp_path / "student")
    config = stored.network.config
    assert stored.config.learning_rate == 2e-3  # of a new model, not of its source: 0.01
    assert (config.hidden_size, config.num_layers) == (16, 2)
    assert report.training.teacher_s > 0
    sizes = "2 x 16 hidden units instead of 1 x 32"
    assert report.methods == [f"distilled from {source(folder)}, {sizes}"]


def test_a_student_has_the_linear_path_of_its_source(folder, tmp_path):
    run = source(folder, "quantiles")
    compress(run, tmp_path / "student", hidden_size=16, **TRAIN)
    own, other = (read_forecaster(path).network for path in (tmp_path / "student", run))
    assert own.linear_weight.abs().max() > 0
    assert torch.equal(own.linear_weight, other.linear_weight)


def test_learning_rates_of_a_chain_are_shares_of_the_first(folder, tmp_path):
    run = source(folder)  # trained at 0.01
    options: dict[str, Any] = {**TRAIN, "steps": 2}
    compress(run, tmp_path / "once", to="int8", **options)
    compress(tmp_path / "once", tmp_path / "rounded", to="fp16")
    compress(tmp_path / "rounded", tmp_path / "twice", to="int8", **options)
    for name in ("once", "twice"):
        stored = read_forecaster(tmp_path / name)
        assert stored.config.learning_rate == 0.005, name
        assert stored.compression is not None
        assert stored.compression.about["source"]["learning_rate"] == 0.01
    config = tmp_path / "rounded" / "config.json"
    assert json.loads(config.read_bytes())["compression"]["source"]["learning_rate"] == 0.01


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"horizon": 5}, "the teacher has horizon 5 and the student 6"),
        ({"input_size": 30}, "the teacher has input_size 30 and the student 24"),
        ({"past": ()}, "the teacher has num_past 0 and the student 1"),
        ({"output": "quantiles"}, "the teacher has output quantiles and the student point"),
        ({"target": ("temp",), "past": ("y",)}, "the teacher has columns"),
        ({"split": "50/30/20"}, "was trained on another table"),
        ({"tbptt": 12, "batch_size": 2}, "the teacher has stateful True and the student False"),
    ],
)
def test_a_teacher_with_another_task_is_refused(folder, tmp_path, changes, message):
    run = source(folder)
    Forecaster(**{**QUICK, "steps": 1, **changes}).fit(waves()).save(tmp_path / "teacher")
    with pytest.raises(ConfigError, match=message):
        compress(run, tmp_path / "student", distil=str(tmp_path / "teacher"), **TRAIN)
    assert not (tmp_path / "student").exists()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prune": 0.5, "temperature": 3.0, "distil": "x"}, ConfigError, "`temperature` is for"),
        ({"rnn_size": 16}, ConfigError, "`rnn_size` is not an option for .*`hidden_size`"),
        ({"prune": 0.2, "structured": "units"}, ConfigError, "of 32 hidden units removes none"),
        ({"to": "int8", "data": "absent.csv"}, DataError, "there is no file"),
        ({"distil": "absent"}, RunDirectoryError, "no such run"),
    ],
)
def test_wrong_options_are_refused_in_one_line(folder, tmp_path, options, error, message):
    with pytest.raises(error, match=message) as caught:
        compress(source(folder), tmp_path / "small", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "small").exists()


def test_a_busy_machine_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(CpuTimer, "was_busy", lambda timer, share: True)
    report = compress(source(folder), tmp_path / "small", to="int8")
    text = "the machine was busy while speeds were measured: an idle machine is faster"
    assert text in report.notes


def test_a_quantized_run_is_a_teacher(folder, tmp_path):
    compress(source(folder), tmp_path / "int8", to="int8")
    options: dict[str, Any] = {**TRAIN, "hidden_size": 16, "to": "int4"}
    report = compress(tmp_path / "int8", tmp_path / "student", **options)
    assert report.notes[0] == (
        f"{tmp_path / 'int8'} is stored as int8: its rounded weights are the teacher's"
    )
    assert report.training.teacher_s > 0
    stored = read_forecaster(tmp_path / "student")
    assert stored.network.config.hidden_size == 16
    assert stored.compression.weights == "int4"  # type: ignore[union-attr]
    # its sizes are RUN's, its teacher is another
    options["distil"] = str(source(folder))
    report = compress(tmp_path / "int8", tmp_path / "other", **options)
    assert not any("its rounded weights" in note for note in report.notes)


def test_training_on_continues_in_fp32(folder, tmp_path):
    compress(source(folder), tmp_path / "int8", to="int8")
    model = Forecaster.load(tmp_path / "int8")
    model.partial_fit(pq.read_table(folder / "point.parquet"))
    model.save(tmp_path / "again")
    stored = read_forecaster(tmp_path / "again")
    assert stored.compression is None
    assert json.loads((tmp_path / "again" / "config.json").read_bytes())["format"] == 5


def test_errors_by_blocks_equal_a_backtest(folder):
    for kind in ("everything", "quantiles"):
        stored = read_forecaster(source(folder, kind))
        model = Forecaster.load(source(folder, kind))
        dataset = prepare(folder / f"{kind}.parquet", stored.config, like=stored.schema.timeline)
        inputs = apply_schema(dataset, stored)
        split = split_table(dataset.table, dataset.frequency, stored.config.split)
        sizes = stored.network.config
        index = split.windows(dataset.table, "test", sizes.input_size, sizes.horizon)
        rows = np.array_split(index.rows(), 10)
        errors = block_errors(stored, inputs, rows)
        expected = model.backtest(frame=folder / f"{kind}.parquet", scaled=True)["forecaster"]
        for name, value in errors.means_of_all().items():
            assert value == pytest.approx(expected[name], rel=1e-5), name
        assert errors.num_values.sum() == expected["num_values"]
        assert "crps" in errors.means or kind == "everything"
        change = forecast.change_of(errors, errors, "mae", "table", 1)
        assert (change.difference, change.low, change.high) == (0, 0, 0)
        means = {**errors.means, "mae": errors.means["mae"] + 1}
        shifted = dataclasses.replace(errors, means=means)
        change = forecast.change_of(errors, shifted, "mae", "table", 1)
        assert (change.difference, change.low, change.high) == pytest.approx((1, 1, 1))


def test_the_bootstrap_draws_neighbouring_blocks_of_a_horizon():
    firsts = np.concatenate([np.arange(32) * 50, 100_000 + np.arange(32) * 50])  # two series
    walk = np.random.default_rng(0).normal(size=64).cumsum()
    order = np.argsort(np.arange(64) * 0.618 % 1)  # as `blocks_of` lists them
    counts = np.arange(64, 128.0)

    before, after = (
        forecast.BlockErrors(firsts[order], np.full(64, 64), counts[order], {"mae": mae[order]})
        for mae in (np.zeros(64), walk)
    )
    for horizon, together in ((1, 1), (50, 1), (51, 2), (300, 6)):
        change = forecast.change_of(before, after, "mae", "table", horizon)
        expected = bootstrap_interval(walk * counts, counts, together)
        assert (change.low, change.high) == pytest.approx(expected)
    change = forecast.change_of(before, after, "mae", "table", 330)  # 9 times 7 of them
    assert (change.low, change.high) == (None, None)
    assert change.difference == pytest.approx(walk @ counts / counts.sum())


def test_the_command_line_names_the_format_in_use(folder, tmp_path, capsys):
    run, out, table = source(folder), tmp_path / "small", str(folder / "point.parquet")
    assert main(["compress", str(run), "--out", str(out), "--to", "int8", "--max-loss", "9"]) == 0
    shown = capsys.readouterr().out
    for label in ("mae", "valid part", "test part", "1 window ", "256 windows", "on disk"):
        assert f"\n{label}" in shown
    note = "weights are stored as int8; forecasts are computed in fp32 with all of them: no faster"
    for command in (["forecast", str(out), table], ["evaluate", str(out), table]):
        assert main(command) == 0
        assert f"note: {note}" in capsys.readouterr().err
    assert main(["info", str(out)]) == 0
    shown = capsys.readouterr().out
    assert f"from {run}" in shown
    size = short_bytes((out / "model.safetensors").stat().st_size)
    assert f"weights in int8, {size} on disk" in shown
    assert note in shown
    assert main(["forecast", str(run), table]) == 0
    assert "note" not in capsys.readouterr().err
    assert load_window_forecaster(out).note == note
    assert load_window_forecaster(run).note is None


def test_a_goal_chooses_the_mildest_way_that_reaches_it(folder, tmp_path, monkeypatch):
    run = source(folder)
    size = compress(run, tmp_path / "int4", to="int4").result.file_bytes
    report = compress(run, tmp_path / "small", max_bytes=str(size))
    assert report.methods == ["int4, rounded to the nearest"]
    assert report.result.file_bytes == size
    tried = [note for note in report.notes if note.startswith("goal: ")]
    assert len(tried) == 2
    assert "not enough" in tried[0]
    assert "chosen" in tried[1]

    batches = set[int]()

    def speed_of(stored, batch):
        batches.add(batch)
        return 1e5 / float(stored.network.config.hidden_size)

    monkeypatch.setattr(forecast, "_speed", speed_of)
    options: dict[str, Any] = {**TRAIN, "streams": 4}
    report = compress(run, tmp_path / "fast", target="6000/s", **options)
    assert read_forecaster(tmp_path / "fast").network.config.hidden_size == 16
    assert report.methods[-1] == "int8, trained with its rounding"
    assert batches == {1, 4, 256}  # of the report, and of the goal
    with pytest.raises(ConfigError, match=r"cannot be reached .* the fastest reaches 6,250 wind"):
        compress(run, tmp_path / "no", target="7000/s", **options)
    assert not (tmp_path / "no").exists()
