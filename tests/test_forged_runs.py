"""Runs of strangers that are resumed: invalid values are named, nothing outside is touched."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastlstm
from fastlstm.cli import info
from fastlstm.errors import CorruptFileError, FastLSTMError, RunDirectoryError, StorageError
from fastlstm.runs.manifest import MANIFEST, FileRecord, Manifest, read_manifest
from fastlstm.system.tensors import decode_tensors, encode_tensors

SIZES: dict[str, Any] = {
    "rnn_size": 8, "embed_size": 4, "batch_size": 2, "seq_length": 8, "precision": "fp32",
    "threads": 1, "tensorboard": False, "sample_every": 0, "device": "cpu", "ema": 0.9,
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A directory with a text and a run on it."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "text.txt").write_text("why does it always do that, the quick brown fox?\n" * 60)
    fastlstm.train(folder / "text.txt", out=folder / "run", observers=(), steps=2, **SIZES)
    return folder


def resume(whole: Path, run: Path, **fields: Any) -> None:
    fastlstm.train(whole / "text.txt", out=run, resume=True, observers=(), steps=4, **fields)


def reseal(directory: Path, name: str, data: bytes) -> None:
    manifest = read_manifest(directory)
    (directory / name).write_bytes(data)
    files = {**manifest.files, name: FileRecord.of(data)}
    (directory / MANIFEST).write_bytes(Manifest(files, True, manifest.extra).to_bytes())


def forge(whole: Path, tmp_path: Path, name: str, change: Callable[[Any], object]) -> Path:
    """Returns a copy of the run in which a file of its checkpoint was changed."""
    run = tmp_path / "run"
    shutil.copytree(whole / "run", run)
    directory = run / "checkpoint-2"
    data = (directory / name).read_bytes()
    if name.endswith(".json"):
        value = json.loads(data)
        change(value)
        data = json.dumps(value).encode()
    else:
        tensors = decode_tensors(data, directory)
        change(tensors)
        data = encode_tensors(tensors)
    reseal(directory, name, data)
    return run


def put(value: Any, *keys: str) -> Callable[[Any], object]:
    """Returns what sets a value in JSON; None drops it."""

    def change(inside: Any) -> None:
        for key in keys[:-1]:
            inside = inside[key]
        inside[keys[-1]] = value
        if value is None:
            del inside[keys[-1]]

    return change


JSON: list[tuple[str, Callable[[Any], object], str]] = [
    ("config.json", put(None, "train"), "'train' is missing"),
    ("config.json", put([], "train"), "invalid values"),
    ("config.json", put("fast", "train", "learning_rate"), "`learning_rate` is 'fast'"),
    ("config.json", put(1, "given", "spare"), "unknown key 'spare'"),
    ("config.json", put(5, "data"), "invalid values"),
    ("config.json", put("x", "data", "num_chars"), "data.num_chars of config.json is 'x'"),
    ("trainer.json", put(None, "meta", "progress"), "'progress' is missing"),
    ("trainer.json", put([], "meta", "progress"), "invalid values"),
    ("trainer.json", put("1", "meta", "progress", "elapsed_s"), "`elapsed_s` is '1'"),
    ("trainer.json", put(0.5, "meta", "progress", "step"), "`step` is 0.5"),
    (
        "trainer.json",
        put({"setup": "x"}, "meta", "progress", "spent"),
        "`spent` is {'setup': 'x'}, expected seconds by part",
    ),
    ("trainer.json", put("1", "meta", "guard", "in_a_row"), "`in_a_row` is '1'"),
    ("trainer.json", put(None, "meta", "loader"), "'loader' is missing"),
    ("trainer.json", put("x", "meta", "average_updates"), "invalid values"),
]


@pytest.mark.parametrize(("name", "change", "message"), JSON)
def test_values_that_make_no_sense_are_named(whole, tmp_path, name, change, message):
    run = forge(whole, tmp_path, name, change)
    with pytest.raises(CorruptFileError, match=f"checkpoint-2.*{message}"):
        resume(whole, run)
    info.run([str(run)])


WEIGHT, MOMENT = "layers.0.weight_hh_l0", "output.weight:exp_avg"
TENSORS: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor | None], str]] = [
    ("model", WEIGHT, lambda _: None, f"'{WEIGHT}' of model.safetensors is missing"),
    ("model", WEIGHT, lambda t: t[:1, :1].clone(), r"is \(1, 1\) torch.float32, expected \(32, 8"),
    ("model", WEIGHT, lambda t: t.long(), r"is \(32, 8\) torch.int64, expected"),
    ("average", WEIGHT, lambda t: t[:1].clone(), r"average.safetensors is \(1, 8\)"),
    ("carried", "h", lambda t: t[..., :1].clone(), r"'h' of carried.safetensors is \(1, 2, 1\)"),
    ("state", "rng_cpu", lambda t: t[:5].clone(), "invalid values"),
    ("optimizer", MOMENT, lambda t: t[:1].clone(), r"exp_avg' of \(1, 8\) torch.float32, expected"),
    ("optimizer", MOMENT, lambda t: t[0, 0].clone(), r"exp_avg' of \(\) torch.float32, expected"),
    ("optimizer", MOMENT, lambda t: t.double(), "torch.float64, expected"),
    ("optimizer", MOMENT, lambda _: None, "the optimizer state of 'output.weight' holds"),
    ("optimizer", "output.weight:step", lambda t: t.long(), "torch.int64, expected"),
]


@pytest.mark.parametrize(("stem", "name", "change", "message"), TENSORS)
def test_tensors_that_do_not_fit_are_named(whole, tmp_path, stem, name, change, message):
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        changed = change(tensors.pop(name))
        if changed is not None:
            tensors[name] = changed

    run = forge(whole, tmp_path, f"{stem}.safetensors", spoil)
    with pytest.raises(FastLSTMError, match=message):
        resume(whole, run)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_lines_are_added_to_no_file_outside(whole, tmp_path, kind):
    run = forge(whole, tmp_path, "trainer.json", put(None, "meta", "metrics"))
    other = tmp_path / "other"
    other.write_bytes(b"precious\n")
    (run / "metrics.jsonl").unlink()
    if kind == "link":
        (run / "metrics.jsonl").symlink_to(other)
    else:
        os.mkfifo(run / "metrics.jsonl")
    with pytest.raises(StorageError, match=r"metrics\.jsonl: .*expected a regular file; remove it"):
        resume(whole, run)
    assert other.read_bytes() == b"precious\n"


def test_tensorboard_writes_nowhere_outside(whole, tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(whole / "run", run)
    other.mkdir()
    (run / "tensorboard").symlink_to(other)
    with pytest.raises(RunDirectoryError, match="tensorboard is a symbolic link, expected a dir"):
        resume(whole, run, tensorboard=True)
    assert list(other.iterdir()) == []


def test_a_text_run_is_shown_whatever_its_config_says(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole / "run", run)
    config = json.loads((run / "config.json").read_bytes())
    for name, value in (("data", [1]), ("train", "x"), ("given", None)):
        config[name] = value
    reseal(run, "config.json", json.dumps(config).encode())
    assert info.run([str(run)]) == 0
