"""Shards of a step: as one or one after another they give the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fastlstm
from fastlstm.text.task import TextTask

OPTIONS: dict[str, Any] = {
    "rnn_size": 16, "embed_size": 8, "seq_length": 16, "batch_size": 10, "steps": 12, "seed": 3,
    "threads": 1, "device": "cpu", "eval_every": 1000, "tensorboard": False, "shards": 4,
}  # fmt: skip


def trained(place: Path, text: Path, **options: Any) -> tuple[bytes, list[str]]:
    events = list[Any]()
    fastlstm.train(str(text), out=str(place), observers=[events.append], **OPTIONS, **options)
    said = [event["text"] for event in events if event["event"] == "message"]
    return (place / "model.safetensors").read_bytes(), said


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{k} times {k} is {k * k}.\n" for k in range(400)))
    return path


@pytest.mark.parametrize(
    "options",
    [
        {"dropout": 0.2, "recurrent_dropout": 0.1, "lane_reset": 0.2, "precision": "bf16"},
        {"order": "windows", "ema": 0.9, "optimizer": "adamw", "precision": "fp32"},
    ],
)
def test_joined_shards_train_the_same_model(
    tmp_path: Path, text: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    joined, said = trained(tmp_path / "joined", text, **options)
    assert not any("one after another" in line for line in said)
    monkeypatch.setattr(TextTask, "joining_refusal", lambda *_: "of this test")
    one_by_one, said = trained(tmp_path / "apart", text, **options)
    assert sum("one after another: of this test" in line for line in said) == 1
    assert joined == one_by_one
