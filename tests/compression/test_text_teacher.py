"""A teacher of texts keeps the logits of the first epoch, or reads every batch."""

from __future__ import annotations

import dataclasses
from itertools import islice

import numpy as np
import pytest
import torch
from torch import Tensor

from fastlstm.compression import text_teacher
from fastlstm.compression.distillation import Logits, Output
from fastlstm.compression.text_teacher import (
    ReadingTeacher,
    RememberingTeacher,
    Teaching,
    TextTeacher,
    open_teacher,
)
from fastlstm.errors import Stopped
from fastlstm.text.config import ModelConfig, TrainConfig
from fastlstm.text.data.loader import TextLoader
from fastlstm.text.initialization import initialize
from fastlstm.text.model import LanguageModel
from fastlstm.text.plan import open_batches

IDS = np.random.default_rng(0).integers(0, 20, 1000).astype(np.uint8)
CONFIG = TrainConfig(rnn_size=8, embed_size=8, batch_size=4, seq_length=24, seed=3, lane_reset=0.2)
WHOLE = slice(None)


def make_teaching(*, needs_features: bool = False) -> Teaching:
    model = LanguageModel(ModelConfig(vocab_size=20, embed_size=8, rnn_size=12))
    initialize(model, None, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that the state matters
    return Teaching(model.eval().requires_grad_(False), 2.0, 0.5, needs_features)


def make_loader(config: TrainConfig = CONFIG) -> TextLoader:
    return TextLoader(open_batches(config, IDS))


def make_teacher(loader: TextLoader, precision: str = "fp32") -> TextTeacher:
    return open_teacher(make_teaching(), precision, loader)


def logits(teacher: TextTeacher) -> Tensor:
    return teacher.output(WHOLE).logits(WHOLE, torch.float32)


def test_the_first_epoch_is_read_as_by_a_teacher_that_reads_every_batch() -> None:
    loader = make_loader()
    keeps, reads = make_teacher(loader), ReadingTeacher(make_teaching(), "fp32", 4)
    for batch in islice(loader.first_epoch(), loader.steps_per_epoch):
        for teacher in (keeps, reads):
            teacher.read(batch)
            teacher.read(batch)  # as where a step is tried again
            teacher.advance()
        assert isinstance(keeps.output(WHOLE), Logits)
        assert isinstance(reads.output(WHOLE), Output)
        torch.testing.assert_close(logits(keeps), logits(reads), atol=1e-2, rtol=2e-3)
        part = slice(1, 3)
        want = logits(keeps).view(24, 4, 20)[:, part].flatten(0, 1)
        assert torch.equal(keeps.output(part).logits(WHOLE, torch.float32), want)
    assert keeps.seconds > 0
    assert keeps.carried() == {}


def test_later_epochs_get_what_was_predicted_at_the_same_place_of_the_text() -> None:
    loader = make_loader()
    teacher, kept = make_teacher(loader), torch.full((1000, 20), torch.nan)
    positions = set()
    for _ in range(4 * loader.steps_per_epoch):
        batch = loader.next()
        teacher.read(batch)
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


def test_what_the_first_epoch_leaves_out_is_read_with_it() -> None:
    loader = make_loader(dataclasses.replace(CONFIG, lane_reset=0.0))
    teacher = make_teacher(loader)
    assert isinstance(teacher, RememberingTeacher)
    teacher._logits.fill_(torch.nan)
    list(map(teacher.read, islice(loader.first_epoch(), loader.steps_per_epoch)))
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
    for _ in range(epoch * loader.steps_per_epoch + index):
        teacher.read(loader.next())
    for _ in range(3):
        batch, same = loader.next(), again.next()
        assert torch.equal(batch.x, same.x)
        teacher.read(batch)
        resumed.read(same)
        assert torch.equal(logits(teacher), logits(resumed))
    loader.close()
    again.close()


def test_windows_features_and_long_texts_are_read_every_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    windows = make_loader(dataclasses.replace(CONFIG, order="windows", lane_reset=0.0))
    assert isinstance(open_teacher(make_teaching(), "fp32", windows), ReadingTeacher)
    matching = open_teacher(make_teaching(needs_features=True), "fp32", make_loader())
    assert isinstance(matching, ReadingTeacher)
    for limit, kind in ((1000 * 20 * 2, RememberingTeacher), (1000 * 20 * 2 - 1, ReadingTeacher)):
        monkeypatch.setattr(text_teacher, "MAX_KEPT_BYTES", limit)
        assert isinstance(make_teacher(make_loader()), kind)


def test_reading_again_can_be_stopped() -> None:
    loader = TextLoader(open_batches(CONFIG, IDS), should_stop=lambda: True)
    teacher = make_teacher(loader)
    with pytest.raises(Stopped):
        teacher.read(next(make_loader().first_epoch()))
