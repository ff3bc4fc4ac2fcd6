"""`fastlstm.train(start=RUN)`: what is taken from RUN, what is refused, how it is resumed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from safetensors.torch import load_file

import fastlstm
from fastlstm.errors import ConfigError, FormatError
from fastlstm.report.lines import end_notes
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system.storage import encode_json
from fastlstm.text.config import TrainConfig
from fastlstm.training.optimizer import DEFAULT_LEARNING_RATE

TINY: dict[str, Any] = {
    "batch_size": 2, "seq_length": 16, "sample_every": 0, "precision": "fp32", "threads": 1,
    "tensorboard": False, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text("a bad cab had a beef, " * 200)
    return path


@pytest.fixture(scope="module")
def first(book):
    sizes = {"rnn_size": 16, "embed_size": 8, "dropout": 0.2, "weight_drop": 0.1}
    return train(book, book.parent / "first", steps=2, residual=True, **sizes).path


def train(book, out, **options):
    return fastlstm.train(book, out=out, **{"observers": (), **TINY, **options})


def messages(events):
    return "\n".join(event["text"] for event in events if event["event"] == "message")


def test_what_comes_from_the_run_is_said_and_stored(book, first, tmp_path):
    events: list[dict[str, Any]] = []
    run = train(book, tmp_path / "on", start=first, steps=1, observers=[events.append])
    said = messages(events)
    assert f"from {first}: the weights, 1 layer of 16 units, 9 tokens (char)" in said
    assert "embed_size 8, weight_drop 0.1, residual True" in said
    stored = json.loads((run.path / "config.json").read_text())
    record = json.loads((first / "manifest.json").read_text())["files"]["model.safetensors"]
    assert stored["start"] == {"path": str(first), "model_sha256": record["sha256"]}
    assert (stored["model"]["rnn_size"], stored["train"]["weight_drop"]) == (16, 0.1)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"rnn_size": 24}, "`rnn_size=24`: the run in `start` has 16; leave it out"),
        ({"preset": "tiny"}, "`preset='tiny'`: the run in `start` has rnn_size 16, embed_size 8"),
        ({"tie_weights": True}, "`tie_weights=True`: the run in `start` has False"),
        ({"vocab": "byte"}, "`vocab='byte'`: the run in `start` has char"),
        ({"config": TrainConfig(num_layers=2, steps=1)}, "`num_layers=2`: the run in `start` has"),
    ],
    ids=str,
)
def test_what_contradicts_the_run_is_refused(book, first, tmp_path, given, text):
    options = given if "config" in given else {**TINY, **given}
    with pytest.raises(ConfigError) as refused:
        fastlstm.train(book, out=tmp_path / "on", start=first, observers=(), **options)
    assert text in str(refused.value)
    assert not (tmp_path / "on").exists()


def test_options_of_the_run_itself_contradict_nothing(book, first, tmp_path):
    options = json.loads((first / "config.json").read_text())["train"]
    config = TrainConfig(**{**options, "steps": 1, "weight_drop": 0.3})
    run = fastlstm.train(
        book, out=tmp_path / "on", start=first, config=config, given=options, observers=()
    )
    stored = json.loads((run.path / "config.json").read_text())
    assert (stored["model"]["residual"], stored["model"]["weight_drop"]) == (True, 0.3)


def test_a_resumed_run_takes_the_same_start_or_none(book, first, tmp_path):
    out, other = tmp_path / "on", train(book, tmp_path / "other", start=first, steps=1).path
    train(book, out, start=first, steps=2)
    for steps, start in ((3, None), (4, first)):
        train(book, out, start=start, steps=steps, resume=True)
    assert json.loads((out / "config.json").read_text())["start"]["path"] == str(first)
    with pytest.raises(FormatError, match=r"was started with another model \(.*first\)"):
        train(book, out, start=other, steps=5, resume=True)
    with pytest.raises(FormatError, match="was started without `start`; leave it out"):
        train(book, first, start=other, steps=5, resume=True)


@pytest.fixture(scope="module")
def int8(book, first):
    fastlstm.compress(first, out=book.parent / "int8", to="int8", observers=())
    return book.parent / "int8"


def test_rounded_weights_are_where_training_starts(book, int8, tmp_path):
    events: list[dict[str, Any]] = []
    still = {"learning_rate": 1e-12, "dropout": 0.0, "ema": 0.0}
    run = train(book, tmp_path / "on", start=int8, steps=1, observers=[events.append], **still)
    assert "as int8: training starts with these values and stores fp32" in messages(events)
    expected = fastlstm.LM.load(int8).model.state_dict()
    for name, weight in load_file(run.path / "model.safetensors").items():
        assert (weight - expected[name]).abs().max() < 1e-6, name
    assert "compression" not in json.loads((run.path / "config.json").read_text())


def test_zeros_of_a_pruned_run_would_not_stay(book, int8, tmp_path):
    files = RunDirectory(int8).read_published(["config.json", "model.safetensors"])[1]
    config = json.loads(files["config.json"])
    config["compression"] |= {"prune": 0.5, "structured": "none"}
    tokenizer = (int8 / "tokenizer.json").read_bytes()
    pruned = RunDirectory(tmp_path / "pruned")
    pruned.create()
    pruned.publish({**files, "tokenizer.json": tokenizer, "config.json": encode_json(config)})
    with pytest.raises(FormatError, match=r"is pruned \(50% zeros\).*fastlstm compress"):
        train(book, tmp_path / "on", start=pruned.path, steps=1)


def test_the_default_rate_is_lower_on_the_text_of_the_start(book, first, tmp_path):
    (tmp_path / "other.txt").write_text("a bead, a cab, ad " * 300)
    rates, said = [], []
    for name, text in (("same", book), ("other", tmp_path / "other.txt")):
        events: list[dict[str, Any]] = []
        run = train(text, tmp_path / name, start=first, steps=1, observers=[events.append])
        options = json.loads((run.path / "config.json").read_text())["train"]
        rates.append(options["learning_rate"] / DEFAULT_LEARNING_RATE[options["optimizer"]])
        said.append("0.3 of the default: the run in" in messages(events))
    assert rates == pytest.approx([0.3, 1.0])
    assert said == [True, False]


@pytest.mark.parametrize("rate", [1.0, 1e-4])
def test_the_start_counts_as_an_evaluation_and_may_stay_the_best(book, tmp_path, rate):
    events: list[dict[str, Any]] = []
    first = train(book, tmp_path / "first", steps=60, rnn_size=16, embed_size=8).path
    own = {"learning_rate": rate, "observers": [events.append], "steps": 3, "eval_every": 1}
    run = train(book, tmp_path / "on", start=first, **own)
    scores = [e for e in events if e["event"] == "eval"]
    assert [e["step"] for e in scores] == [0, 1, 2, 3]
    assert len({e["num_units"] for e in scores}) == 1
    best = min(scores, key=lambda e: e["loss"])
    assert (best["step"] == 0) == (rate == 1.0)
    kept, weights = (load_file(path / "model.safetensors") for path in (run.path, first))
    is_same = all(bool((kept[name] == value).all()) for name, value in weights.items())
    assert is_same == (rate == 1.0)
    notes = " ".join(end_notes(next(e for e in events if e["event"] == "end"), {}))
    assert ("no better than the start" in notes) == (rate == 1.0)
