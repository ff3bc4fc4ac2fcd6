"""Compressing text models: what is written, what is measured, what continues exactly."""

import json
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import fastlstm
from compression_source import StopAfter, text_of
from fastlstm.cli.main import main
from fastlstm.compression import text, text_training
from fastlstm.compression.report import CompressReport
from fastlstm.compression.text import TextModel
from fastlstm.errors import (
    ConfigError,
    CorruptFileError,
    DataError,
    FormatError,
    NonFiniteError,
    QualityError,
    RunDirectoryError,
    Stopped,
)
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.runs.weight_formats import as_floats, decode_weights, rounded
from fastlstm.system.measurements import CpuTimer
from fastlstm.system.storage import encode_json
from fastlstm.text import weight_report
from fastlstm.text.config import COMPRESSED_VERSION
from fastlstm.text.decoder import make_decoder
from fastlstm.text.stored_model import load_stored_model, parameter_shapes, parse_config
from fastlstm.text.weight_report import report_weights
from fastlstm.training.callbacks import Callback
from fastlstm.training.checkpoint import load_checkpoint

Compress = Callable[..., CompressReport]


def config_in(run):
    return parse_config((run / "config.json").read_bytes(), run)[1]


def weights_in(run):
    """The weights of a compressed run by name, as float32."""
    data, shapes = (run / "model.safetensors").read_bytes(), parameter_shapes(config_in(run))
    return as_floats(decode_weights(data, shapes, compression_of(run)["weights"], run))


def compression_of(run):
    return dict(json.loads((run / "config.json").read_text())["compression"])


@pytest.mark.charts
@pytest.mark.parametrize("to", ["fp16", "int8", "int4"])
def test_rounding(to, source, compressed, tmp_path):
    report, out = compressed(to=to), tmp_path / "out"
    stored = load_stored_model(source)
    want = rounded(stored.weights, to)
    got = weights_in(out)
    assert got.keys() == want.keys()
    for name, weight in got.items():
        np.testing.assert_array_equal(weight, want[name], name)
    assert json.loads((out / "config.json").read_text())["format_version"] == COMPRESSED_VERSION
    about = compression_of(out)
    assert about["weights"] == to
    assert about["prune"] is None
    assert about["source"]["model_sha256"] == report.source.sha256
    assert about["options"]["to"] == to
    assert RunDirectory(out).verify() == []
    assert json.loads((out / "compression.json").read_text()) == json.loads(
        encode_json(report.to_dict()).decode()
    )
    page = (out / "report.html").read_text()
    assert "<h2>Compression</h2>" in page
    assert "could not be drawn" not in page
    assert report.training is None
    assert report.is_published


def test_figures_of_rounding(source, trained, compressed, tmp_path):
    report: Any = compressed(to="int8")
    stored = load_stored_model(source)
    text = fastlstm.LM.load(source).read(trained / "book.txt")
    valid = text.split("90/5/5").valid
    data = (tmp_path / "out/model.safetensors").read_bytes()
    result = TextModel.of_file(data, tmp_path / "out", stored.model_config, "int8")
    source_decoder = make_decoder(stored.weights, stored.model_config, "fp32")
    decoders = source_decoder, result.decoder
    want = [report_weights(d, stored.tokenizer, valid).bits_per_char for d in decoders]
    assert [report.source.quality, report.result.quality] == pytest.approx(want, rel=1e-12)
    events = [json.loads(line) for line in (source / "metrics.jsonl").read_text().splitlines()]
    own = next(event for event in events if event["event"] == "end")["best_bits_per_char"]
    assert report.source.quality == pytest.approx(own, rel=1e-5)
    assert report.change.difference == pytest.approx(want[1] - want[0], abs=1e-12)
    assert report.change.low <= report.change.difference <= report.change.high
    assert report.change.scored_on == f"the validation part of {trained / 'book.txt'}"
    assert report.loss == report.change.difference
    assert report.source.file_bytes == (source / "model.safetensors").stat().st_size
    assert report.result.file_bytes == len(data)
    assert report.result.file_bytes < 0.5 * report.source.file_bytes
    assert 0 < report.outputs.rms < report.outputs.largest < 0.5
    assert 0.9 < report.outputs.agreement <= 1.0
    assert set(report.result.speed) == {1, 64}
    assert report.methods == ["int8, rounded to the nearest"]
    assert "int8" in report.result.kernel


def test_speeds_of_a_busy_machine_are_named(compressed, monkeypatch):
    timers: list[CpuTimer] = []

    def was_busy(timer, share):
        timers.append(timer)
        return True

    monkeypatch.setattr(CpuTimer, "was_busy", was_busy)
    monkeypatch.setattr(weight_report, "_SPEED_S", 0.01)
    text = "the machine was busy while speeds were measured: an idle machine is faster"
    assert compressed(to="int8").notes == [text]
    assert timers[-1].wall_s >= 12 * 0.01, "2 models, 2 numbers of streams, 3 rounds"


def test_another_text_may_be_measured_on(compressed, trained, tmp_path):
    (tmp_path / "other.txt").write_text(text_of(300, seed=5) + "Ü")
    report = compressed(to="int8", data=tmp_path / "other.txt")
    assert report.change is not None
    assert report.change.scored_on == str(tmp_path / "other.txt")
    assert report.change.num_scored == len(text_of(300, seed=5)) - 1  # all but the first and the Ü
    again = compressed("again", to="int8", data=trained / "book.txt")
    assert again.change is not None
    assert again.change.scored_on == f"the validation part of {trained / 'book.txt'}"


def test_without_its_text_a_model_is_not_measured(source, compressed):
    forget_text(source)
    report = compressed(to="fp16")
    assert report.change is None
    assert report.result.quality is None
    assert report.not_measured is not None
    why = "the run's validation text is unreadable (no such file or directory: gone.txt"
    assert report.not_measured.startswith(why)
    with pytest.raises(DataError, match=r"`max_loss` cannot be checked: .*; give `data`"):
        compressed("other", to="fp16", max_loss=0.1)


def forget_text(run):
    """Has a run name a text that is not there."""
    directory = RunDirectory(run)
    config = json.loads((run / "config.json").read_text())
    config["data"]["source"] = "gone.txt"
    directory.publish({"config.json": json.dumps(config).encode()})


def test_a_damaged_result_has_no_checkpoint(compressed, tmp_path):
    compressed(to="int8")
    (tmp_path / "out/model.safetensors").write_bytes(b"broken")
    with pytest.raises(CorruptFileError) as caught:
        load_stored_model(tmp_path / "out")
    end = f". {tmp_path / 'out'} has no intact checkpoint to use instead"
    assert str(caught.value).endswith(end)


@pytest.mark.parametrize("to", ["fp32", "fp16"])
@pytest.mark.parametrize(
    ("options", "victim"),
    [({"to": "int8"}, "source"), ({"steps": 1}, "source"), ({"distil": "", "steps": 1}, "teacher")],
)
def test_weights_that_are_not_finite_are_found_at_once(to, options, victim, source, tmp_path):
    paths = {"source": source, "teacher": tmp_path / "teacher"}
    shutil.copytree(source, paths["teacher"])
    if to == "fp16":
        fastlstm.compress(source, out=tmp_path / "half", to=to, observers=())
        paths[victim] = tmp_path / "half"
    weights = safetensors.numpy.load_file(paths[victim] / "model.safetensors")
    weights["layers.0.weight_hh_l0"][3, 5] = np.inf
    RunDirectory(paths[victim]).publish({"model.safetensors": safetensors.numpy.save(weights)})
    if "distil" in options:
        options = {**options, "distil": str(paths["teacher"])}
    with pytest.raises(NonFiniteError) as caught:
        fastlstm.compress(paths["source"], out=tmp_path / "out", observers=(), **options)
    text = f"{paths[victim]}: 'layers.0.weight_hh_l0' holds NaN or Inf; use an earlier checkpoint"
    assert str(caught.value) == f"{text} or another run"
    assert not list((tmp_path / "out").glob("[!.]*")), "nothing is begun"


def test_a_loss_above_the_limit_writes_nothing(compressed, tmp_path):
    with pytest.raises(QualityError, match="; nothing is published in") as caught:
        compressed(to="int4", max_loss=0.0)
    assert caught.value.exit_code == 2
    assert caught.value.report["result"]["weights"] == "int4"
    assert not caught.value.report["is_published"]
    assert not (tmp_path / "out").exists()
    assert compressed(to="int4", max_loss=5.0).max_loss == 5.0


def test_an_existing_run_is_not_overwritten(compressed, tmp_path):
    compressed(to="int8")
    before = (tmp_path / "out/model.safetensors").read_bytes()
    with pytest.raises(RunDirectoryError, match="give another `out`"):
        compressed(to="fp16")
    assert (tmp_path / "out/model.safetensors").read_bytes() == before


def test_training_with_rounding(source, compressed, tmp_path):
    report, out = compressed(to="int4", steps=4), tmp_path / "out"
    assert report.methods == ["int4, trained with its rounding"]
    assert report.training is not None
    assert report.training.steps == 4
    weights = weights_in(out)
    for name, weight in rounded(weights, "int4").items():
        np.testing.assert_array_equal(weights[name], weight)
    plain = rounded(load_stored_model(source).weights, "int4")
    assert any((weights[name] != plain[name]).any() for name in weights)
    assert RunDirectory(out).verify() == []
    # A checkpoint holds the weights that training goes on with, in fp32.
    assert compression_of(out / "checkpoint-4")["weights"] == "fp32"
    assert load_stored_model(out / "checkpoint-4").model_config.rnn_size == 32
    end = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][-1]
    assert end["compression"] == json.loads((out / "compression.json").read_text())


def test_training_that_loses_quality_is_published_with_its_loss(compressed, tmp_path, capsys):
    fields: dict[str, Any] = {"to": "int4", "steps": 3, "learning_rate": 10.0}
    with pytest.raises(QualityError):
        compressed("refused", **fields, max_loss=0.0)
    assert not (tmp_path / "refused/model.safetensors").exists()
    report, plain = compressed(**fields), compressed("plain", to="int4")
    assert report.methods == ["int4, trained with its rounding"]
    assert report.result.quality > plain.result.quality
    assert report.change.difference > plain.change.difference
    assert main(["info", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "weights in int4, " in shown
    assert "validation bits/char at step" in shown


def test_a_pruned_model_finds_its_teacher_from_another_directory(
    source, compressed, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    fields: dict[str, Any] = {
        "prune": 0.5, "steps": 6, "log_every": 1, "threads": 1, "precision": "fp32",
        "tensorboard": False,
    }  # fmt: skip
    stop = StopAfter(3)
    with pytest.raises(Stopped):
        fastlstm.compress("source", out="out", **fields, observers=[stop.observe], stop=stop)
    monkeypatch.chdir(tmp_path / "out")
    report = fastlstm.compress("../source", out="../out", **fields, resume=True, observers=())
    assert report.methods == ["50 % of the weights pruned", "distilled from ../source"]
    whole = compressed("whole", **fields)
    assert report.result.sha256 == whole.result.sha256
    alone = compressed("alone", **fields, alpha=0.0)
    assert alone.methods == ["50 % of the weights pruned"]
    assert compression_of(tmp_path / "alone")["teacher"] is None


def test_resume_with_another_teacher_is_refused(trained, source, compressed, tmp_path):
    shutil.copytree(source, tmp_path / "teacher")
    fields: dict[str, Any] = {"distil": str(tmp_path / "teacher"), "log_every": 1, "steps": 6}
    stop = StopAfter(3)
    with pytest.raises(Stopped):
        compressed(**fields, observers=[stop.observe], stop=stop)
    shutil.rmtree(tmp_path / "teacher")
    fastlstm.train(
        trained / "book.txt", out=tmp_path / "teacher", steps=1, rnn_size=32, embed_size=16,
        batch_size=4, seq_length=16, threads=1, tensorboard=False, observers=(), sample_every=0,
        seed=7,
    )  # fmt: skip
    with pytest.raises(FormatError, match="was started with another teacher, or"):
        compressed(**fields, resume=True)


def test_training_starts_from_the_source(compressed):
    events: list[Any] = []
    compressed(to="fp16", steps=1, learning_rate=1e-9, observers=[events.append])
    evals = [event["bits_per_char"] for event in events if event["event"] == "eval"]
    plain = compressed("plain", to="fp16").source.quality
    assert evals[-1] == pytest.approx(plain, rel=0.05)


def test_zeros(compressed, tmp_path):
    report = compressed(prune=0.5, steps=4, to="int8")
    weights = weights_in(tmp_path / "out")
    recurrent = weights["layers.0.weight_hh_l0"]
    assert (recurrent == 0).mean() >= 0.5
    assert report.result.num_nonzero < 0.6 * report.result.num_parameters
    assert report.notes == ["the same speed as without zeros: no kernel is faster for single zeros"]
    assert report.methods[0] == "50 % of the weights pruned"
    assert compression_of(tmp_path / "out")["structured"] == "none"


def test_blocks_are_stored_block_sparse(compressed, tmp_path):
    report = compressed(prune=0.75, structured="blocks", steps=4, to="int8")
    stored = safetensors.numpy.load_file(tmp_path / "out/model.safetensors")
    assert "layers.0.weight_hh_l0.blocks" in stored
    rows = weights_in(tmp_path / "out")["layers.0.weight_hh_l0"].reshape(4, 2, 16, 8, 4)
    is_zero = (rows == 0).all(axis=(2, 4))
    assert is_zero.mean() == 0.75
    assert report.notes == []


def test_units_make_a_smaller_model(compressed, tmp_path):
    report = compressed(prune=0.3, structured="units", steps=3, distil=str(tmp_path / "source"))
    assert config_in(tmp_path / "out").rnn_size == 16
    assert report.result.num_parameters < 0.6 * report.source.num_parameters
    assert report.methods[0] == "50 % of the hidden units pruned (32 -> 16)", "of 0.3"
    about = compression_of(tmp_path / "out")
    assert (about["prune"], about["options"]["prune"]) == (0.5, 0.3)
    assert report.training is not None
    assert report.training.teacher_s > 0


def test_a_student_of_other_sizes(compressed, source, tmp_path):
    report = compressed(rnn_size=8, num_layers=2, steps=3)
    model = config_in(tmp_path / "out")
    assert (model.rnn_size, model.num_layers, model.embed_size) == (8, 2, 16)
    assert report.methods == [f"distilled from {source}, a new model"]
    train = json.loads((tmp_path / "out/config.json").read_text())["train"]
    assert train["learning_rate"] == 0.01  # a new model's
    assert train["dropout"] == 0.0  # it has a teacher
    teacher = compression_of(tmp_path / "out")["teacher"]
    assert teacher == {"path": str(source), "model_sha256": report.source.sha256}


def test_a_teacher_with_another_tokenizer_is_refused(compressed, tmp_path, trained):
    (tmp_path / "other.txt").write_text(text_of(300).upper())
    other = fastlstm.train(
        tmp_path / "other.txt", out=tmp_path / "other", steps=1, rnn_size=8, embed_size=8,
        batch_size=2, seq_length=8, precision="fp32", threads=1, tensorboard=False, observers=(),
    )  # fmt: skip
    with pytest.raises(FormatError, match="has another tokenizer than"):
        compressed(distil=other.path, steps=1)
    assert not (tmp_path / "out").exists()


def test_training_without_its_text_is_refused(compressed, source, tmp_path):
    forget_text(source)
    with pytest.raises(DataError) as caught:
        compressed(to="int8", steps=2)
    assert "cannot be read (no such file or directory: gone.txt" in str(caught.value)
    assert str(caught.value).endswith("; give it as `data`")
    assert not (tmp_path / "out").exists()


class Early(Callback):
    def on_update(self, trainer):
        trainer.end("enough")


def test_a_run_that_ends_before_its_pruning_publishes_nothing(compressed, tmp_path):
    with pytest.raises(ConfigError, match="before the weights were pruned and rounded"):
        compressed(prune=0.5, steps=8, callbacks=[Early()])
    assert not (tmp_path / "out/model.safetensors").exists()
    assert compressed(resume=True, steps=8).is_published


def test_a_loss_above_the_limit_keeps_checkpoints(compressed, tmp_path):
    with pytest.raises(QualityError, match="Its checkpoints stay") as caught:
        compressed(rnn_size=8, steps=2, max_loss=0.0)
    out = tmp_path / "out"
    for name in ("model.safetensors", "config.json", "compression.json", "manifest.json"):
        assert not (out / name).exists()
    assert (out / "checkpoint-2").is_dir()
    assert caught.value.report["training"]["steps"] == 2
    assert "not published" in (out / "report.html").read_text()
    report = compressed(resume=True, max_loss=9.0)
    assert report.is_published
    assert report.training.steps == 2  # type: ignore[union-attr]
    model = (out / "model.safetensors").read_bytes()
    with pytest.raises(QualityError) as caught:
        compressed(resume=True, steps=3, max_loss=0.0)
    assert f"; '{out}' keeps the model that was published there before. Its" in str(caught.value)
    assert "nothing is published" not in str(caught.value)
    assert (out / "model.safetensors").read_bytes() == model


def test_a_budget_reserves_time_for_the_scored_tokens(compressed, monkeypatch):
    class Reserve(Callback):
        def on_begin(self, trainer):
            seconds = [trainer.task.finish_s(unit_s) for unit_s in (1.0, 0.0)]
            self.tokens = round((seconds[0] - seconds[1]) / 2, 6)  # of source and result

    for limit in (64, text.MAX_SCORED):
        monkeypatch.setattr(text, "MAX_SCORED", limit)
        reserve = Reserve()
        report = compressed(f"out{limit}", to="fp16", steps=1, callbacks=[reserve])
        assert report.change is not None
        assert report.change.num_scored <= reserve.tokens <= report.change.num_scored + 64


EVERYTHING = {"to": "int8", "prune": 0.5, "steps": 8, "log_every": 1}


def test_a_resumed_compression_ends_the_same(compressed, source, tmp_path, monkeypatch):
    monkeypatch.setattr(text_training, "MAX_KEPT_BYTES", 0)  # the teacher reads every batch
    options = {**EVERYTHING, "distil": str(source), "seed": 3}
    whole = compressed("whole", **options)
    for steps in (2, 3):
        stop = StopAfter(steps)
        with pytest.raises(Stopped):
            compressed(**options, stop=stop, observers=[stop.observe], resume=True)
        assert not (tmp_path / "out/model.safetensors").exists()
    carried = safetensors.numpy.load_file(tmp_path / "out/checkpoint-5/carried.safetensors")
    assert set(carried) == {"h", "c", "teacher_h", "teacher_c"}
    earlier = load_checkpoint(tmp_path / "out/checkpoint-5").meta["callbacks"]["TeacherTime"]
    resumed = compressed(resume=True)  # the options are those of the first start
    assert resumed.result.sha256 == whole.result.sha256
    assert resumed.change == whole.change
    assert resumed.training is not None
    assert resumed.training.teacher_s > earlier["seconds"] > 0
    for name in ("model", "best", "optimizer", "carried"):
        files = [tmp_path / run / f"checkpoint-8/{name}.safetensors" for run in ("whole", "out")]
        assert files[0].read_bytes() == files[1].read_bytes(), name


def test_what_a_resumed_compression_refuses(compressed, source, trained, tmp_path):
    compressed(to="int8", steps=2)
    with pytest.raises(ConfigError, match="`to='int4'`: this run was started with int8"):
        compressed(to="int4", resume=True)
    with pytest.raises(ConfigError, match="`seed=7`: this run was started with 0"):
        compressed(seed=7, resume=True)
    with pytest.raises(RunDirectoryError, match=r"already contains a run \(step 2\); give `r"):
        compressed(to="int8", steps=2)
    assert compressed(steps=3, resume=True).training.steps == 3  # type: ignore[union-attr]
    other = tmp_path / "another"
    shutil.copytree(source, other)
    weights = safetensors.numpy.load_file(other / "model.safetensors")
    weights["output.bias"] += 1
    RunDirectory(other).publish({"model.safetensors": safetensors.numpy.save(weights)})
    with pytest.raises(FormatError, match="was started from another model"):
        fastlstm.compress(other, out=tmp_path / "out", resume=True, observers=())
    with pytest.raises(FormatError, match="was started by train, not by compress"):
        fastlstm.compress(other, out=source, resume=True, observers=())
    with pytest.raises(FormatError, match="was started by compress, not by train; continue it"):
        fastlstm.train(trained / "book.txt", out=tmp_path / "out", resume=True, observers=())


def test_a_damaged_record_of_a_checkpoint_is_named(compressed, tmp_path):
    compressed(to="int8", steps=2)
    checkpoint = RunDirectory(tmp_path / "out/checkpoint-2")
    config = json.loads((checkpoint.path / "config.json").read_text())
    del config["compression"]["source"]["model_sha256"]
    checkpoint.publish({"config.json": json.dumps(config).encode()})
    words = "checkpoint-2/config.json: compression.source.model_sha256 is None, expected a text"
    with pytest.raises(FormatError, match=words):
        compressed(resume=True)


def test_zeros_stay_in_a_second_compression(compressed, tmp_path):
    compressed(prune=0.5, steps=6)
    before = weights_in(tmp_path / "out")
    fastlstm.compress(
        tmp_path / "out", out=tmp_path / "again", to="int8", steps=4, learning_rate=0.5,
        observers=(), threads=1, tensorboard=False, precision="fp32",
    )  # fmt: skip
    after = weights_in(tmp_path / "again")
    name = "layers.0.weight_hh_l0"
    assert (after[name] != before[name]).any()
    assert not after[name][before[name] == 0].any()
    about = compression_of(tmp_path / "again")
    assert (about["prune"], about["structured"]) == (0.5, "none")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights": "int7"}, "compression.weights is 'int7', expected one of fp32, fp16"),
        ({"prune": "x"}, "compression.prune is 'x' and compression.structured None"),
        ({"options": [1]}, r"compression.options is \[1\], expected a JSON object"),
        ({"source": None}, "compression.source is None, expected a JSON object"),
        ({"source": {"path": 5}}, "compression.source.path is 5, expected a text"),
    ],
)
def test_forged_records(change, words, compressed, tmp_path):
    compressed(to="int8")
    file = tmp_path / "out/config.json"
    config = json.loads(file.read_text())
    config["compression"] |= change
    with pytest.raises(FormatError, match=words):
        parse_config(json.dumps(config).encode(), file)
