"""A small trained text model to compress."""

import shutil
from pathlib import Path

import pytest

import fastlstm
from compression_source import text_of
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system.measurements import CpuTimer


@pytest.fixture(autouse=True)
def never_busy(monkeypatch):
    monkeypatch.setattr(CpuTimer, "was_busy", lambda timer, share: False)


@pytest.fixture
def run(tmp_path):
    """A run directory without a checkpoint."""
    found = RunDirectory(tmp_path / "run")
    found.create()
    found.metrics_path.touch()
    return found


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder with the text book.txt and the run `source` trained on it, H=32 E=16."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "book.txt").write_text(text_of(1500))
    fastlstm.train(
        folder / "book.txt", out=folder / "source", steps=12, rnn_size=32, embed_size=16,
        batch_size=4, seq_length=16, precision="fp32", threads=1, tensorboard=False, observers=(),
        sample_every=0,
    )  # fmt: skip
    return folder


@pytest.fixture
def source(trained, tmp_path):
    """A copy of the run."""
    return Path(shutil.copytree(trained / "source", tmp_path / "source"))


@pytest.fixture
def compressed(source, tmp_path):
    """Compresses the run into `out`, quietly, on one thread."""

    def run(out="out", **fields):
        quiet = {"observers": (), "threads": 1, "tensorboard": False, "precision": "fp32"}
        return fastlstm.compress(source, out=tmp_path / out, **{**quiet, **fields})

    return run
