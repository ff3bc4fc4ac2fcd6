"""A teacher of texts keeps the logits of the first epoch, or reads every batch."""

from __future__ import annotations

import dataclasses
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastlstm.compression import text_training
from fastlstm.compression.text_training import (
    Logits,
    OutputLayer,
    ReadingTeacher,
    RememberingTeacher,
    Teaching,
    open_teacher,
)
from fastlstm.errors import Stopped
from fastlstm.text.config import ModelConfig, TrainConfig
from fastlstm.text.data.lanes import TextLoader
from fastlstm.text.model import LanguageModel, initialize
from fastlstm.text.plan import open_batches
from fastlstm.training.task import even_parts

IDS = np.random.default_rng(0).integers(0, 20, 1000).astype(np.uint8)
CONFIG = TrainConfig(rnn_size=8, embed_size=8, batch_size=4, seq_length=24, seed=3, lane_reset=0.2)
WHOLE = slice(None)


def make_teaching() -> Teaching:
    model = LanguageModel(ModelConfig(vocab_size=20, embed_size=8, rnn_size=12))
    initialize(model, None, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that the state matters
    return Teaching(model.eval().requires_grad_(False), 2.0, 0.5)


def make_loader(config: TrainConfig = CONFIG) -> TextLoader:
    return TextLoader(open_batches(config, IDS))


def make_teacher(loader: TextLoader, precision: str = "fp32") -> ReadingTeacher:
    return open_teacher(make_teaching(), precision, loader)


def logits(teacher: ReadingTeacher) -> Tensor:
    return teacher.output(WHOLE).logits(WHOLE, torch.float32)


def test_kept_logits_equal_those_of_a_reading_teacher() -> None:
    loader = make_loader()
    keeps, reads = make_teacher(loader), ReadingTeacher(make_teaching(), "fp32", 4)
    for batch in islice(loader.first_epoch(), loader.steps_per_epoch):
        for teacher in (keeps, reads):
            teacher.read(batch, even_parts(len(batch.reset), 1))
        found = [teacher.output(WHOLE) for teacher in (keeps, reads)]
        assert [type(output) for output in found] == [Logits, OutputLayer]
        own, other = (output.logits(WHOLE, torch.float32) for output in found)
        torch.testing.assert_close(own, other, atol=1e-2, rtol=2e-3)
        keeps.advance()
        reads.advance()
        part = slice(1, 3)
        want = logits(keeps).view(24, 4, 20)[:, part].flatten(0, 1)
        assert torch.equal(keeps.output(part).logits(WHOLE, torch.float32), want)
    assert keeps.seconds > 0
    assert keeps.carried() == {}


def test_later_epochs_get_the_logits_of_the_same_positions() -> None:
    loader = make_loader()
    teacher, kept = make_teacher(loader), torch.full((1000, 20), torch.nan)
    positions = set()
    for _ in range(4 * loader.steps_per_epoch):
        batch = loader.next()
        teacher.read(batch, even_parts(len(batch.reset), 1))
        rows = batch.positions()
        assert torch.equal(torch.from_numpy(IDS[rows.numpy()].astype(np.int64)), batch.x)
        got = logits(teacher)
        assert torch.isfinite(got).all()
        if batch.epoch == 0:
            kept[rows.flatten()] = got
            positions |= set(rows.flatten().tolist())
        elif batch.epoch > 0:
            known = torch.isfinite(kept[rows.flatten()]).all(1)
            assert torch.equal(got[known], kept[rows.flatten()][known])
    assert 0 < len(positions) < 1000
    loader.close()


def test_tokens_outside_the_batches_are_read_too() -> None:
    loader = make_loader(dataclasses.replace(CONFIG, lane_reset=0.0))
    teacher = make_teacher(loader)
    assert isinstance(teacher, RememberingTeacher)
    teacher._logits.fill_(torch.nan)
    for batch in loader.first_epoch():
        teacher.read(batch, even_parts(len(batch.reset), 1))
    assert torch.isfinite(teacher._logits).all()
    starts = [int(start) for start in next(loader.first_epoch()).start]
    length = loader.steps_per_epoch * 24
    assert starts[0] > 0
    assert starts[-1] + length < 999
    model, tokens = make_teaching().model, torch.from_numpy(IDS.astype(np.int64))
    with torch.no_grad():
        head, _ = model(tokens[: starts[0], None])
        last, _ = model(tokens[starts[-1] :, None])
    got = teacher._logits.float()
    torch.testing.assert_close(got[: starts[0]], head[:, 0], atol=1e-2, rtol=2e-3)
    torch.testing.assert_close(got[starts[-1] :], last[:, 0], atol=1e-2, rtol=2e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("epoch", "index"), [(0, 5), (2, 3)])
def test_a_resumed_training_gets_the_same_predictions(
    precision: str, epoch: int, index: int
) -> None:
    loader, again = make_loader(), make_loader()
    teacher, resumed = make_teacher(loader, precision), make_teacher(again, precision)
    again.load_state_dict({"epoch": epoch, "index": index})
    resumed.catch_up(again, 2, None)
    for _ in range(epoch * loader.steps_per_epoch + index):
        batch = loader.next()
        teacher.read(batch, even_parts(len(batch.reset), 2))
    for _ in range(3):
        batch, same = loader.next(), again.next()
        assert torch.equal(batch.x, same.x)
        teacher.read(batch, even_parts(len(batch.reset), 2))
        resumed.read(same, even_parts(len(same.reset), 2))
        assert torch.equal(logits(teacher), logits(resumed))
    loader.close()
    again.close()


def test_windows_and_long_texts_are_read_every_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    windows = make_loader(dataclasses.replace(CONFIG, order="windows", lane_reset=0.0))
    assert isinstance(open_teacher(make_teaching(), "fp32", windows), ReadingTeacher)
    for limit, kind in ((1000 * 20 * 2, RememberingTeacher), (1000 * 20 * 2 - 1, ReadingTeacher)):
        monkeypatch.setattr(text_training, "MAX_KEPT_BYTES", limit)
        assert isinstance(make_teacher(make_loader()), kind)


def test_catching_up_is_shown_and_can_be_stopped() -> None:
    asked, seen = [], list[tuple[int, int]]()

    def should_stop() -> bool:
        asked.append(None)
        return len(asked) > 4

    loader = TextLoader(open_batches(CONFIG, IDS), should_stop)
    loader.load_state_dict({"epoch": 0, "index": 7})
    teacher = make_teacher(loader)
    with pytest.raises(Stopped):
        teacher.catch_up(loader, 1, lambda done, total: seen.append((done, total)))
    assert seen == [(96 * k, 96 * 7) for k in range(1, 5)]
    assert loader.state_dict() == {"epoch": 0, "index": 7}


def test_batches_of_training_are_read_without_polling_stop() -> None:
    loader = TextLoader(open_batches(CONFIG, IDS), should_stop=lambda: True)
    teacher = make_teacher(loader)
    batch = next(make_loader().first_epoch())
    teacher.read(batch, even_parts(len(batch.reset), 1))
    assert torch.isfinite(logits(teacher)).all()


@pytest.mark.parametrize("max_kept_bytes", [0, 2**30])
@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_a_step_that_ran_out_of_memory_is_read_again(
    num_parts: int, max_kept_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_training, "MAX_KEPT_BYTES", max_kept_bytes)
    loader = make_loader()
    teacher, calm = make_teacher(loader), make_teacher(loader)
    own, calls = teacher._model.features, []

    def features(tokens: Tensor, state: Any) -> Any:
        calls.append(None)
        if len(calls) in (1, 2, 5, 9):
            raise torch.OutOfMemoryError
        return own(tokens, state)

    monkeypatch.setattr(teacher._model, "features", features)
    for batch in loader.first_epoch():
        calm.read(batch, even_parts(len(batch.reset), 1))
        want = logits(calm)
        calm.advance()
        for _ in range(9):
            try:
                teacher.read(batch, even_parts(4, num_parts))
                found = [
                    teacher.output(slice(int(p[0]), int(p[-1]) + 1)).logits(WHOLE, torch.float32)
                    for p in torch.arange(4).tensor_split(num_parts)
                ]
            except torch.OutOfMemoryError:
                continue
            teacher.advance()
            break
        got = torch.cat([part.view(24, -1, 20) for part in found], dim=1).flatten(0, 1)
        torch.testing.assert_close(got, want)
    assert len(calls) > 9


def test_logits_beyond_float16_stay_finite() -> None:
    teaching = make_teaching()
    with torch.no_grad():
        teaching.model.output.bias[3] = -1e6
    loader = make_loader()
    teacher = open_teacher(teaching, "fp32", loader)
    batch = next(loader.first_epoch())
    teacher.read(batch, even_parts(len(batch.reset), 1))
    assert logits(teacher).min() == -65_504
