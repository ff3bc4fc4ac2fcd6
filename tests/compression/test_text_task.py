"""A student of texts: its teacher reads the same lanes, and its state is carried."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastlstm.compression import text_training
from fastlstm.compression.text_training import MEASURING_S, CompressedTextTask, Teaching
from fastlstm.text.config import ModelConfig, TrainConfig
from fastlstm.text.data.lanes import TextLoader
from fastlstm.text.data.tokenizer import CharTokenizer
from fastlstm.text.model import LanguageModel, initialize
from fastlstm.text.plan import open_batches
from fastlstm.training.task import even_parts

TOKENIZER = CharTokenizer("\n abcdefghijklmnopqr")
IDS = np.random.default_rng(0).integers(0, 20, 1000).astype(np.uint8)
CONFIG = TrainConfig(
    rnn_size=8, embed_size=8, batch_size=6, seq_length=10, steps=5, precision="fp32",
    learning_rate=0.01, dropout=0.0,
)  # fmt: skip


def build(rnn_size: int, seed: int) -> LanguageModel:
    model = LanguageModel(ModelConfig(vocab_size=20, embed_size=8, rnn_size=rnn_size))
    initialize(model, None, seed)
    return model


def make_task(teaching: Teaching | None, model: LanguageModel | None = None) -> CompressedTextTask:
    return CompressedTextTask(
        config=CONFIG, model=model or build(8, 1), loader=TextLoader(open_batches(CONFIG, IDS)),
        valid_ids=IDS[:300], tokenizer=TOKENIZER, device=torch.device("cpu"), model_files={},
        report_s=1.5,
        teaching=teaching, conclude=lambda trainer: {"concluded": True}, num_scored=200,
    )  # fmt: skip


def teaching(alpha: float = 0.5) -> Teaching:
    return Teaching(build(12, 2).eval().requires_grad_(False), temperature=2.0, alpha=alpha)


@pytest.fixture
def _reads_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_training, "MAX_KEPT_BYTES", 0)


def gradients(task: CompressedTextTask, batch: Any, num_parts: int) -> tuple[float, list[Tensor]]:
    task.model.zero_grad()
    total = 0.0
    for loss in task.losses(batch, even_parts(task.num_rows(batch), num_parts)):
        loss.backward()
        total += loss.item()
    return total, [p.grad.clone() for p in task.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("num_parts", [2, 6])
@pytest.mark.parametrize("max_kept_bytes", [0, 2**30])
def test_a_split_batch_equals_the_whole_batch(
    num_parts: int, max_kept_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_training, "MAX_KEPT_BYTES", max_kept_bytes)
    whole, cut = make_task(teaching()), make_task(teaching())
    cut.model.load_state_dict(whole.model.state_dict())
    for _ in range(3):
        want, want_gradients = gradients(whole, whole.loader.next(), 1)
        got, got_gradients = gradients(cut, cut.loader.next(), num_parts)
        assert got == pytest.approx(want, rel=1e-6)
        assert len(got_gradients) == len(list(whole.model.parameters()))
        for own, other in zip(got_gradients, want_gradients, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-7)
        for name, tensor in whole.carried().items():
            torch.testing.assert_close(cut.carried()[name], tensor)


@pytest.mark.usefixtures("_reads_every_batch")
def test_the_teacher_carries_its_state() -> None:
    task = make_task(teaching())
    assert task.teaching is not None
    state = task.teaching.model.initial_state(6)
    for _ in range(3):
        batch = task.loader.next()
        list(task.losses(batch, [slice(0, 6)]))
        _, state = task.teaching.model.features(batch.x, state)
    torch.testing.assert_close(task.carried()["teacher_h"], state[0])
    torch.testing.assert_close(task.carried()["teacher_c"], state[1])
    assert task.teacher_s > 0


@pytest.mark.usefixtures("_reads_every_batch")
def test_carried_state_is_restored() -> None:
    task, other = make_task(teaching()), make_task(teaching())
    list(task.losses(task.loader.next(), [slice(0, 6)]))
    other.restore_carried(task.carried())
    other.loader.load_state_dict(task.loader.state_dict())
    want = gradients(task, task.loader.next(), 1)[0]
    assert gradients(other, other.loader.next(), 1)[0] == want
    task.reset_state()
    assert all(not tensor.any() for tensor in task.carried().values())
    with pytest.raises(ValueError, match="teacher_h"):
        other.restore_carried({name: task.carried()[name] for name in "hc"})


def test_a_resumed_teacher_catches_up_before_the_first_step() -> None:
    task, other = make_task(teaching()), make_task(teaching())
    for _ in range(3):
        list(task.losses(task.loader.next(), [slice(0, 6)]))
    other.loader.load_state_dict(task.loader.state_dict())
    other.restore_carried(task.carried())
    assert other.teacher_s > 0
    assert set(other.carried()) == {"h", "c"}
    want = gradients(task, task.loader.next(), 1)
    assert gradients(other, other.loader.next(), 1)[0] == want[0]


def test_without_a_share_of_the_teacher_the_loss_is_plain() -> None:
    plain, student = make_task(None), make_task(teaching(alpha=0.0))
    want = gradients(plain, plain.loader.next(), 1)
    got = gradients(student, student.loader.next(), 1)
    assert got[0] == pytest.approx(want[0], rel=1e-6)
    for own, other in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-7)
    assert set(plain.carried()) == {"h", "c"}


def test_bits_per_char_exclude_the_teacher() -> None:
    plain, student = make_task(None), make_task(teaching())
    loss = gradients(plain, plain.loader.next(), 1)[0]
    mixed = gradients(student, student.loader.next(), 2)[0]
    assert abs(mixed - loss) > 1e-3
    want = {"bits_per_char": pytest.approx(loss / math.log(2), rel=1e-6)}
    assert plain.step_metrics(loss) == want
    assert student.step_metrics(mixed) == want


def test_the_teacher_is_not_trained_and_has_no_dropout() -> None:
    task = make_task(teaching())
    assert task.teaching is not None
    task.model.train()
    before = [p.clone() for p in task.teaching.model.parameters()]
    gradients(task, task.loader.next(), 1)
    assert not task.teaching.model.training
    assert all(p.grad is None for p in task.teaching.model.parameters())
    for own, other in zip(task.teaching.model.parameters(), before, strict=True):
        assert torch.equal(own, other)


def test_a_budget_reserves_time_for_measuring() -> None:
    assert make_task(None).finish_s(0.01) == pytest.approx(1.5 + MEASURING_S + 2 * 0.01 * 200)
