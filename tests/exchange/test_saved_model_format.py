"""What can be held of SavedModels without TensorFlow."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastlstm.exchange import saved_model_format

FAKE = """
numbers = {"intra": 0, "inter": 0}
class config:
    class threading:
        pass
for kind in numbers:
    def put(num, kind=kind):
        numbers[kind] = num
    setattr(config.threading, f"set_{kind}_op_parallelism_threads", staticmethod(put))
    get = lambda kind=kind: numbers[kind]
    setattr(config.threading, f"get_{kind}_op_parallelism_threads", staticmethod(get))
"""


@pytest.fixture
def _fake_tensorflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "tensorflow.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    saved_model_format._tensorflow.cache_clear()
    yield
    saved_model_format._tensorflow.cache_clear()
    sys.modules.pop("tensorflow", None)


@pytest.mark.usefixtures("_fake_tensorflow")
def test_one_thread() -> None:
    assert saved_model_format._threads(saved_model_format._tensorflow()) == "one thread"


@pytest.mark.usefixtures("_fake_tensorflow")
def test_threads_of_a_program_that_uses_tensorflow_stay() -> None:
    import tensorflow  # type: ignore[import-not-found]

    tensorflow.config.threading.set_intra_op_parallelism_threads(2)
    told = "threads: 2 within an operation, as many as it takes between them"
    assert saved_model_format._threads(saved_model_format._tensorflow()) == told
