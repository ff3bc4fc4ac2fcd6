"""`valid` and `test` of a text model: texts of their own instead of shares of the source."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastlstm
from fastlstm.cli.main import main
from fastlstm.errors import (
    ConfigError,
    DataError,
    FormatError,
    RunDirectoryError,
    Stopped,
    UnknownCharacterError,
)
from fastlstm.report.lines import end_rows
from fastlstm.text import task as task_module
from fastlstm.text import train as train_module
from fastlstm.text.config import TrainConfig
from fastlstm.text.data.text import prepare_text
from fastlstm.text.evaluation import evaluate
from fastlstm.text.held_out import validation_ids

TINY: dict[str, Any] = {
    "rnn_size": 16, "embed_size": 8, "batch_size": 4, "seq_length": 8, "precision": "fp32",
    "threads": 1, "tensorboard": False, "sample_every": 0, "device": "cpu", "dropout": 0.0,
    "steps": 6, "eval_every": 2, "learning_rate": 0.01,
}  # fmt: skip
TEXT = "the quick brown fox jumps over a lazy dog and why does it always do that"


def words(count, seed):
    pick = random.Random(seed)
    return "".join(pick.choice(TEXT.split()) + pick.choice([" ", " ", ".\n"]) for _ in range(count))


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A directory with book.txt, valid.txt and test.txt, which is the current one."""
    for seed, (name, count) in enumerate((("book", 600), ("valid", 80), ("test", 90))):
        (tmp_path / f"{name}.txt").write_text(words(count, seed))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(out="run", **fields):
    events: list[dict[str, Any]] = []
    given = {"source": "book.txt", "observers": [events.append], **TINY, **fields}
    return fastlstm.train(given.pop("source"), out=out, **given), events


def kinds(events, kind):
    return [event for event in events if event["event"] == kind]


def notes(events):
    return "\n".join(event["text"] for event in kinds(events, "message"))


def ids_of(name):
    source = prepare_text("book.txt")
    data = prepare_text(name, tokenizer=source.tokenizer, unknown="count")
    return list(map(int, data.ids))


@pytest.mark.parametrize(
    ("files", "trained", "valid", "note"),
    [
        ((), 0.9, (0.9, 0.95), ""),
        (("valid",), 0.95, "valid.txt", "95% training, 5% test; validation on valid.txt"),
        (("test",), 0.95, (0.95, 1.0), "95% training, 5% validation; test on test.txt"),
        (("valid", "test"), 1.0, "valid.txt", "100% training; validation on valid.txt, test on"),
    ],
)
def test_the_share_of_a_file_is_trained_on(texts, monkeypatch, files, trained, valid, note):
    seen: dict[str, list[int]] = {}
    training_loader, initialize = train_module.training_loader, train_module.initialize

    def loader(config, ids, *rest):
        seen["ids"] = list(map(int, ids))
        return training_loader(config, ids, *rest)

    def initialized(model, counts, *rest):
        seen["counts"] = counts.tolist()
        initialize(model, counts, *rest)

    monkeypatch.setattr(train_module, "training_loader", loader)
    monkeypatch.setattr(train_module, "initialize", initialized)
    scored = []

    def watch(name):
        evaluated = getattr(task_module, name)

        def watched(model, ids, *given, **settings):
            scored.append(list(map(int, ids)))
            return evaluated(model, ids, *given, **settings)

        monkeypatch.setattr(task_module, name, watched)

    watch("lane_nats")
    watch("evaluate")
    _, events = train(**{part: f"{part}.txt" for part in files})
    book = ids_of("book.txt")
    end = int(len(book) * trained + 1e-6)
    assert seen["ids"] == book[:end]
    assert seen["counts"] == np.bincount(book[:end], minlength=max(book) + 1).tolist()
    wanted = ids_of(valid) if isinstance(valid, str) else None
    if wanted is None:
        wanted = book[end : int(len(book) * valid[1] + 1e-6)]
    tests = [ids_of("test.txt")] if "test" in files else []
    assert scored == [wanted] * len(kinds(events, "eval")) + tests
    (start,) = kinds(events, "start")
    rest = ids_of("test.txt") if tests else book[int(len(book) * 0.95 + 1e-6) :]
    sizes = {"train": end, "valid": len(wanted), "test": len(rest)}
    assert start["num_units"] == sizes
    assert note in notes(events)
    assert ("training" in notes(events)) == bool(files)
    assert ("test" in kinds(events, "end")[0]) == bool(tests)


class Spoil(fastlstm.Callback):
    """Ruins the weights after a step, so that an earlier evaluation stays the best."""

    def __init__(self, after):
        self.after = after

    def on_update(self, trainer):
        if trainer.progress.step >= self.after:
            with torch.no_grad():
                for weight in trainer.model.parameters():
                    weight.add_(torch.randn_like(weight))


@pytest.mark.parametrize("vocab", ["char", "byte", "bpe"])
def test_shares_and_files_give_the_same_figure(texts, vocab):
    if vocab == "bpe":
        pytest.importorskip("tokenizers")
    pick = random.Random(1)
    known = [f" {pick.randrange(30):04d}" for _ in range(800)]
    other = [f" {pick.randrange(30, 60):04d}" for _ in range(200)]  # merges would gain by these
    for name, parts in (("all", known + other), ("train", known), ("valid", other)):
        (texts / f"{name}.txt").write_text("".join(parts))
    fields = {"vocab": vocab, "vocab_size": 300, "split": "80/20/0"}
    shares, _ = train("shares", source="all.txt", **fields)
    files, _ = train("files", source="train.txt", valid="valid.txt", **fields)
    assert shares.bits_per_char == files.bits_per_char
    both = [(run.path / "tokenizer.json").read_bytes() for run in (shares, files)]
    assert both[0] == both[1]


def test_the_test_text_is_scored_with_the_best_weights(texts):
    run, events = train(test="test.txt", callbacks=[Spoil(after=4)])
    (end,) = kinds(events, "end")
    assert end["best_step"] == 4 < end["step"]
    found = fastlstm.LM.load("run").evaluate(Path("test.txt"))
    assert end["test"] == {
        "loss": found.nats_per_token,
        "bits_per_char": found.bits_per_char,
        "bits_per_byte": found.bits_per_byte,
        "perplexity": found.perplexity,
        "num_units": len(ids_of("test.txt")) - 1,
        "of_units": len(ids_of("test.txt")) - 1,
    }
    assert run.test.bits_per_char == found.bits_per_char < run.bits_per_char
    assert end["spent_s"]["test"] > 0
    # A resumed run has the best weights only in its run directory.
    again, events = train(test="test.txt", resume=True, steps=8, callbacks=[Spoil(after=4)])
    assert kinds(events, "end")[0]["test"] == end["test"]
    assert again.test is not None


@pytest.mark.parametrize("kind", ["step", "checkpoint"])
def test_a_stopped_run_ends_bit_equal(texts, kind):
    """The last checkpoint is written before the test text is scored: the stop comes while it is."""
    files = {"valid": "valid.txt", "test": "test.txt"}
    wanted, _ = train("whole", **files)
    step, stops = {"step": 3, "checkpoint": 6}[kind], []

    def observe(event):
        if event["event"] == kind and event["step"] == step:
            stops.append(True)

    with pytest.raises(Stopped, match=f"checkpoint-{step} is saved"):
        train(**files, observers=[observe], stop=lambda: bool(stops), log_every=1)
    run, _ = train(resume=True)
    assert run.test is not None
    assert wanted.test is not None
    for found, whole in ((run.test, wanted.test), (run.evaluation, wanted.evaluation)):
        assert found.nats_per_token == whole.nats_per_token


def test_within_a_budget_a_part_is_scored_and_said(texts, monkeypatch):
    class Ends(fastlstm.Callback):
        def on_update(self, trainer):
            trainer.end("enough")

    Path("test.txt").write_text(words(1000, 5))
    total = len(ids_of("test.txt")) - 1
    budget = {"steps": None, "budget": "600s", "callbacks": [Ends()]}
    _, events = train("whole", test="test.txt", **budget)
    assert kinds(events, "end")[0]["test"]["num_units"] == total
    assert "fit the budget" not in notes(events)
    monkeypatch.setattr(task_module, "_TEST_SHARE", 1e-9)
    _, events = train(test="test.txt", **budget)
    test = kinds(events, "end")[0]["test"]
    assert (test["num_units"], test["of_units"]) == (1000, total)
    part = f"tested on the first 1,000 of {total:,} tokens of test.txt: all would not fit"
    assert part in notes(events)
    assert f"1,000 of {total:,} tokens" in dict(end_rows(kinds(events, "end")[0], {}))["test"]


def test_of_a_budget_a_tenth_is_kept():
    ids = np.zeros(1_000_001, np.uint8)
    none: Any = None
    test = task_module.FinalTest("test.txt", ids, 100.0, none, none)
    assert test.seconds(1e-3) == 10.0
    assert test.seconds(1e-6) == pytest.approx(1.0)
    assert test.limit(1e-3, 50.0) == 10_000
    assert test.limit(1e-3, 4.0) == 4_000
    assert test.limit(1e-3, -1.0) == 1_000
    assert test.limit(1e-6, 50.0) == 1_000_000
    unlimited = task_module.FinalTest("test.txt", ids, None, none, none)
    assert unlimited.seconds(1e-3) == 0.0
    assert unlimited.limit(1e-3, -1.0) == 1_000_000


@pytest.mark.parametrize("part", ["valid", "test"])
def test_unknown_characters_are_left_out_and_said(texts, part):
    path = Path(f"{part}.txt")
    known = path.read_text()
    _, events = train("known", **{part: path.name})
    path.write_text("ß" + known + "☃☃", encoding="utf-8")
    _, others = train(**{part: path.name})
    share = f"left out 3 of {len(known) + 3:,} characters ({3 / (len(known) + 3):.2%})"
    assert f"{part}.txt: {share}, which the vocabulary does not hold: 'ß' at 0" in notes(others)
    assert "left out" not in notes(events)
    figures = [[e["loss"] for e in kinds(run, "eval")] for run in (events, others)]
    assert figures[0] == figures[1]
    ends = [kinds(run, "end")[0].get("test") for run in (events, others)]
    assert ends[0] == ends[1]


def test_a_text_is_read_as_the_source_is(texts):
    with gzip.open("valid.jsonl.gz", "wt", newline="") as file:
        for line in Path("valid.txt").read_text().splitlines(keepends=True):
            file.write(json.dumps({"body": line.replace("\n", "\r\n")}) + "\n")
    _, events = train(valid="valid.jsonl.gz", text_field="body")
    (start,) = kinds(events, "start")
    data = prepare_text("valid.jsonl.gz", text_field="body")
    assert start["num_units"]["valid"] == data.num_chars
    with pytest.raises(DataError, match=r"valid\.jsonl\.gz"):
        train("other", valid="valid.jsonl.gz", text_field="text")


@pytest.mark.parametrize("vocab", ["byte", "char"])
def test_bytes_hold_every_character(texts, vocab):
    Path("valid.txt").write_text("ß☃ only" * 9, encoding="utf-8")
    _, events = train(valid="valid.txt", vocab=vocab)
    assert ("left out" in notes(events)) == (vocab == "char")


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("", DataError, r"mine\.txt is empty"),
        ("a", DataError, r"mine\.txt has 1 token, expected at least 2; give a longer .* `valid`"),
        ("aßßßß", DataError, r"mine\.txt has 1 token"),
        ("ß☃", UnknownCharacterError, r"mine\.txt: characters that are not in the vocabulary: 'ß'"),
        (None, DataError, r"no such file or directory: mine\.txt"),
    ],
)
def test_what_cannot_be_scored_is_refused_at_the_start(texts, content, error, message):
    if content is not None:
        Path("mine.txt").write_text(content, encoding="utf-8")
    with pytest.raises(error, match=message):
        train(valid="mine.txt")
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"valid": "book.txt"}, r"book\.txt is given both as the source and as `valid`; each"),
        ({"test": "./sub/../book.txt"}, r"book\.txt is given both as the source and as `test`"),
        ({"valid": "link.txt"}, r"book\.txt is given both as the source and as `valid`"),
        ({"source": ".", "test": "valid.txt"}, r"valid\.txt is given both as the source and as"),
        ({"valid": "test.txt", "test": "test.txt"}, r"test\.txt is .* both as `valid` and as"),
        ({"valid": "copy.txt"}, r"text of copy\.txt is given both as the source and as `valid`"),
        ({"source": "-", "valid": "-"}, "stdin is given both as the source and as `valid`"),
    ],
)
def test_a_text_has_one_part(texts, fields, message):
    (texts / "sub").mkdir()
    (texts / "link.txt").symlink_to("book.txt")
    if fields.get("valid") == "copy.txt":
        Path("copy.txt").write_text(Path("book.txt").read_text())
    with pytest.raises(DataError, match=message):
        train(**fields)
    assert not Path("run").exists()


def test_resume_sees_that_the_texts_are_the_same(texts):
    train(valid="valid.txt", test="test.txt")
    with pytest.raises(RunDirectoryError, match="already contains a run"):
        train(valid="valid.txt")
    size = f"{len(Path('valid.txt').read_text()):,} characters"
    Path("other.txt").write_text(words(50, 9))
    told = rf"'run' was started with valid\.txt \({size}\) as `valid`"
    with pytest.raises(FormatError, match=told + r", not with other\.txt; resume with valid\.txt"):
        train(resume=True, steps=8, valid="other.txt")
    with pytest.raises(FormatError, match=told + "; give it to resume"):
        train(resume=True, steps=8, valid=None)
    Path("test.txt").rename("elsewhere.txt")
    with pytest.raises(DataError, match=r"no such file or directory: test\.txt"):
        train(resume=True, steps=8)
    train(resume=True, steps=8, test="elsewhere.txt")
    config = json.loads(Path("run/config.json").read_bytes())
    assert config["train"]["test"] == "elsewhere.txt"
    assert config["data"]["test"]["source"] == "elsewhere.txt"
    assert config["data"]["valid"]["source"] == config["train"]["valid"] == "valid.txt"
    Path("valid.txt").write_text(words(50, 9))
    with pytest.raises(FormatError, match=told + ", which has changed since; resume with it as"):
        train(resume=True, steps=10)


def test_a_run_without_files_is_resumed_without(texts):
    train()
    assert set(json.loads(Path("run/config.json").read_bytes())["data"]) == {
        "source", "key", "num_bytes", "num_chars",
    }  # fmt: skip
    with pytest.raises(FormatError, match="'run' was started without `valid`; leave it out to"):
        train(resume=True, steps=8, valid="valid.txt")
    train(resume=True, steps=8)


def test_the_command_line_and_yaml(texts, capsys):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items() if value]
    flags = [flag for flag in flags if "tensorboard" not in flag]
    Path("run.yaml").write_text("valid: valid.txt\ntensorboard: false\n")
    assert main(["train", "book.txt", "--out", "run", "--config", "run.yaml", "--test",
                 "test.txt", "--sample-every", "0", *flags]) == 0  # fmt: skip
    out = capsys.readouterr().out
    assert "book.txt: 100% training; validation on valid.txt, test on test.txt\n" in out
    test = next(line for line in out.splitlines() if line.startswith("test: "))
    bits = fastlstm.LM.load("run").evaluate(Path("test.txt")).bits_per_char
    assert f"{bits:.4f} bits/char, perplexity" in test
    page = Path("run/report.html").read_text()
    assert f'Test</p><p class="value">{bits:.4f} ' in page
    assert main(["train", "book.txt", "--out", "run2", "--valid", "book.txt", *flags]) == 2
    assert "is given both as the source and as `--valid`;" in capsys.readouterr().err
    assert main(["train", "book.txt", "--out", "run2", "--valid", "run", *flags]) == 2
    assert "run is a run, expected a text" in capsys.readouterr().err


def test_evaluate_names_the_file_of_a_part(texts, capsys):
    train(valid=Path("valid.txt"))
    assert main(["evaluate", "run", "book.txt", "--split", "valid"]) == 2
    told = "the validation split of this run is valid.txt, not a share of its text;"
    assert f"{told} evaluate valid.txt without `--split`" in capsys.readouterr().err
    counts = {}
    for split in ("train", "test"):
        assert main(["evaluate", "run", "book.txt", "--split", split, "--json"]) == 0
        counts[split] = json.loads(capsys.readouterr().out)["num_tokens"]
    num = len(ids_of("book.txt"))
    cut = int(num * 0.95 + 1e-6)
    assert counts == {"train": cut - 1, "test": num - cut - 1}
    assert main(["evaluate", "run", "valid.txt", "--json", "--lanes", "32"]) == 0
    lm = fastlstm.LM.load("run")
    assert list(map(int, validation_ids(lm.config, lm.tokenizer))) == ids_of("valid.txt")
    found = evaluate(lm.model, validation_ids(lm.config, lm.tokenizer), lm.tokenizer)
    assert json.loads(capsys.readouterr().out)["bits_per_char"] == found.bits_per_char
    Path("valid.txt").write_text(words(80, 9))
    with pytest.raises(DataError, match=r"valid\.txt has changed since the run was trained"):
        validation_ids(lm.config, lm.tokenizer)


def test_the_options_take_paths():
    assert TrainConfig(valid=Path("a/b.txt")).valid == "a/b.txt"  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`test` is 5, expected a text"):
        TrainConfig(test=5)  # type: ignore[arg-type]


def test_tables_are_refused(texts):
    Path("table.csv").write_text("a,b\n" + "1,2\n" * 99)
    with pytest.raises(DataError, match=r"table\.csv holds a table"):
        train(valid="table.csv")
