"""Training of a text model that is compressed: options, the loss of a student, its teacher."""

from __future__ import annotations

import dataclasses
import math
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fastlstm.compression import text_training
from fastlstm.compression.options import CompressConfig
from fastlstm.compression.text import TextCompression
from fastlstm.compression.text_training import (
    MEASURING_S,
    CompressedTextTask,
    Logits,
    OutputLayer,
    ReadingTeacher,
    RememberingTeacher,
    TaughtTextTask,
    distillation_loss,
    open_teacher,
    training_options,
)
from fastlstm.errors import Stopped
from fastlstm.text.config import ModelConfig, TrainConfig
from fastlstm.text.data.tokenizer import CharTokenizer
from fastlstm.text.model import LanguageModel, initialize
from fastlstm.text.plan import training_loader
from fastlstm.training.task import even_parts

UNITS: dict[str, Any] = {"prune": 0.5, "structured": "units"}


def options_of(trained, data=None, **fields):
    """Returns the options that the source was trained with, and those of its compression."""
    source = TextCompression(
        run=trained / "source", out=trained / "out", data=data, config=CompressConfig(**fields),
        given=frozenset(), resume=False, observers=[], callbacks=(), stop=None, started=0.0,
    )  # fmt: skip
    options = training_options(source, source.start(source.config)[1])
    return TrainConfig(**source.stored.config["train"]), options


@pytest.mark.parametrize(
    ("fields", "share"),
    [
        ({"to": "int8"}, 0.05),
        ({"distil": "teacher"}, 0.3),
        ({"to": "int8", **UNITS}, 1.0),
        ({"to": "int8", "prune": 0.75}, 2.0),
        ({"prune": 0.95, "structured": "blocks"}, 3.0),
        ({"distil": "teacher", "to": "int4"}, 0.05),
        ({"output_rank": 8, "to": "int8", "steps": 4}, 0.3),
    ],
)
def test_learning_rate(fields, share, trained):
    source, options = options_of(trained, **fields)
    assert source.learning_rate is not None
    assert options.learning_rate == pytest.approx(share * source.learning_rate)
    assert options_of(trained, **fields, learning_rate=0.5)[1].learning_rate == 0.5


def test_a_student_has_the_rate_of_a_new_model(trained):
    options = options_of(trained, rnn_size=16, num_layers=2)[1]
    assert (options.learning_rate, options.rnn_size, options.num_layers) == (None, 16, 2)
    assert options.embed_size == 16


@pytest.mark.parametrize(
    ("fields", "dropout"),
    [
        ({"to": "int8", "steps": 4}, None),
        ({"prune": 0.5}, 0.0),
        ({"output_rank": 8, "steps": 4}, 0.0),
        ({"rnn_size": 16}, 0.0),
        ({"rnn_size": 16, "dropout": 0.2}, 0.2),
    ],
)
def test_dropout(fields, dropout, trained):
    source, options = options_of(trained, **fields)
    assert options.dropout == (source.dropout if dropout is None else dropout)


def test_other_options_are_those_of_the_source(trained):
    source, options = options_of(trained, to="int8", steps=4, batch_size=2, **UNITS)
    changed = {
        field.name
        for field in dataclasses.fields(TrainConfig)
        if getattr(source, field.name) != getattr(options, field.name)
    }
    same = ("seq_length", "optimizer", "split", "vocab", "embed_size", "seed", "precision")
    assert changed.isdisjoint(set(same) - {"precision"})
    assert (options.rnn_size, options.batch_size, options.steps) == (16, 2, 4)


def test_another_text_has_no_parts(trained):
    options = options_of(trained, data="other.txt", to="int8", steps=4)[1]
    assert (options.valid, options.test) == (None, None)


N, V = 150, 11


def outputs(dtype=torch.float64):
    """A student of width 5, a teacher of width 7, and targets."""
    rng = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)

    student = OutputLayer(random(N, 5), random(V, 5), random(V))
    for tensor in student:
        tensor.requires_grad_()
    teacher = OutputLayer(random(N, 7), random(V, 7), random(V))
    return student, teacher, torch.randint(V, (N,), generator=rng)


def plain(student, teacher, targets, temperature, alpha):
    own, other = (F.linear(o.features, o.weight, o.bias) for o in (student, teacher))
    soft = F.log_softmax(own / temperature, 1)
    aim = F.softmax(other / temperature, 1)
    divergence = F.kl_div(soft, aim, reduction="sum")
    nats = F.cross_entropy(own, targets, reduction="sum")
    return alpha * temperature**2 * divergence + (1 - alpha) * nats


@pytest.mark.parametrize(("temperature", "alpha"), [(2.0, 0.5), (1.0, 1.0), (0.7, 0.0), (4.0, 0.9)])
@pytest.mark.parametrize("chunk", [1 << 22, 64 * V])
def test_loss_and_gradients_are_torchs(temperature, alpha, chunk, monkeypatch):
    monkeypatch.setattr(text_training, "CHUNK_ELEMENTS", chunk)  # 3 chunks of 64, 64 and 22 rows
    student, teacher, targets = outputs()
    total, nats = distillation_loss(student, teacher, targets, temperature, alpha)
    want = plain(student, teacher, targets, temperature, alpha)
    torch.testing.assert_close(total, want)
    torch.testing.assert_close(nats, plain(student, teacher, targets, 1.0, 0.0))
    assert not nats.requires_grad
    got = torch.autograd.grad(3 * total, list(student))
    for own, other in zip(got, torch.autograd.grad(3 * want, list(student)), strict=True):
        torch.testing.assert_close(own, other)


def test_autocast_rounds_products_only(monkeypatch):
    monkeypatch.setattr("fastlstm.system.hardware.has_bf16_products", lambda: True)
    student, teacher, targets = outputs(torch.float32)
    want = distillation_loss(student, teacher, targets, 2.0, 0.5)[0]
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = distillation_loss(student, teacher, targets, 2.0, 0.5)
    assert total.dtype == torch.float32
    assert 0 < abs(total.item() - want.item()) / want.item() < 0.01
    total.backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in student)


@pytest.mark.usefixtures("no_bf16_products")
def test_bf16_avoids_products_that_torch_lacks():
    student, teacher, targets = outputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = distillation_loss(student, teacher, targets, 2.0, 0.5)
    torch.testing.assert_close(
        torch.autograd.grad(total, student.weight)[0],
        torch.autograd.grad(plain(student, teacher, targets, 2.0, 0.5), student.weight)[0],
    )


TOKENIZER = CharTokenizer("\n abcdefghijklmnopqr")
IDS = np.random.default_rng(0).integers(0, 20, 1000).astype(np.uint8)
CONFIG = TrainConfig(
    rnn_size=8, embed_size=8, batch_size=6, seq_length=10, steps=5, precision="fp32",
    learning_rate=0.01, dropout=0.0,
)  # fmt: skip


def build(rnn_size, seed):
    model = LanguageModel(ModelConfig(vocab_size=20, embed_size=8, rnn_size=rnn_size))
    initialize(model, None, seed)
    return model


def make_task(teacher=None):
    parts: dict[str, Any] = {
        "config": CONFIG, "model": build(8, 1), "loader": training_loader(CONFIG, IDS),
        "valid_ids": IDS[:300], "tokenizer": TOKENIZER, "device": torch.device("cpu"),
        "model_files": {}, "report_s": 1.5, "conclude": lambda trainer: {"concluded": True},
        "num_scored": 200,
    }  # fmt: skip
    if teacher is None:
        return CompressedTextTask(**parts)
    return TaughtTextTask(**parts, teacher_model=teacher, temperature=2.0, alpha=0.5)


def teacher_model():
    return build(12, 2).eval().requires_grad_(False)


def gradients(task, batch, num_parts):
    task.model.zero_grad()
    total = 0.0
    for loss in task.losses(batch, even_parts(task.num_rows(batch), num_parts)):
        loss.backward()
        total += loss.item()
    return total, [p.grad.clone() for p in task.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("num_parts", [2, 6])
@pytest.mark.parametrize("max_kept_bytes", [0, 2**30])
def test_a_split_batch_equals_the_whole_batch(num_parts, max_kept_bytes, monkeypatch):
    monkeypatch.setattr(text_training, "MAX_KEPT_BYTES", max_kept_bytes)
    whole, cut = make_task(teacher_model()), make_task(teacher_model())
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


def test_bits_per_char_exclude_the_teacher():
    plain, student = make_task(), make_task(teacher_model())
    loss = gradients(plain, plain.loader.next(), 1)[0]
    mixed = gradients(student, student.loader.next(), 2)[0]
    assert abs(mixed - loss) > 1e-3
    want = {"bits_per_char": pytest.approx(loss / math.log(2), rel=1e-6)}
    assert plain.step_metrics(loss) == want
    assert student.step_metrics(mixed) == want


def test_the_teacher_is_not_trained_and_has_no_dropout():
    task = make_task(teacher_model())
    task.model.train()
    before = [p.clone() for p in task.teacher_model.parameters()]
    gradients(task, task.loader.next(), 1)
    assert not task.teacher_model.training
    assert all(p.grad is None for p in task.teacher_model.parameters())
    for own, other in zip(task.teacher_model.parameters(), before, strict=True):
        assert torch.equal(own, other)


def test_a_budget_reserves_time_for_measuring():
    assert make_task().finish_s(0.01) == pytest.approx(1.5 + MEASURING_S + 2 * 0.01 * 200)


READ = TrainConfig(rnn_size=8, embed_size=8, batch_size=4, seq_length=24, seed=3, lane_reset=0.2)
WHOLE = slice(None)


def wide_model():
    model = LanguageModel(ModelConfig(vocab_size=20, embed_size=8, rnn_size=12))
    initialize(model, None, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that the state matters
    return model.eval().requires_grad_(False)


def make_loader(config=READ):
    return training_loader(config, IDS)


def make_teacher(loader, precision="fp32"):
    return open_teacher(wide_model(), precision, loader)


def logits(teacher):
    return teacher.output(WHOLE).logits(WHOLE, torch.float32)


def test_kept_logits_equal_those_of_a_reading_teacher():
    loader = make_loader()
    keeps, reads = make_teacher(loader), ReadingTeacher(wide_model(), "fp32", 4)
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


def test_later_epochs_get_the_logits_of_the_same_positions():
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


def test_tokens_outside_the_batches_are_read_too():
    loader = make_loader(dataclasses.replace(READ, lane_reset=0.0))
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
    model, tokens = wide_model(), torch.from_numpy(IDS.astype(np.int64))
    with torch.no_grad():
        head, _ = model(tokens[: starts[0], None])
        last, _ = model(tokens[starts[-1] :, None])
    got = teacher._logits.float()
    torch.testing.assert_close(got[: starts[0]], head[:, 0], atol=1e-2, rtol=2e-3)
    torch.testing.assert_close(got[starts[-1] :], last[:, 0], atol=1e-2, rtol=2e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("epoch", "index"), [(0, 5), (2, 3)])
def test_a_resumed_training_gets_the_same_predictions(precision, epoch, index):
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


def test_windows_and_long_texts_are_read_every_time(monkeypatch):
    windows = make_loader(dataclasses.replace(READ, order="windows", lane_reset=0.0))
    assert isinstance(open_teacher(wide_model(), "fp32", windows), ReadingTeacher)
    for limit, kind in ((1000 * 20 * 2, RememberingTeacher), (1000 * 20 * 2 - 1, ReadingTeacher)):
        monkeypatch.setattr(text_training, "MAX_KEPT_BYTES", limit)
        assert isinstance(make_teacher(make_loader()), kind)


def test_catching_up_is_shown_and_can_be_stopped():
    asked, seen = [], list[tuple[int, int]]()

    def should_stop():
        asked.append(None)
        return len(asked) > 4

    loader = training_loader(READ, IDS, should_stop)
    loader.load_state_dict({"epoch": 0, "index": 7})
    teacher = make_teacher(loader)
    with pytest.raises(Stopped):
        teacher.catch_up(loader, 1, lambda done, total: seen.append((done, total)))
    assert seen == [(96 * k, 96 * 7) for k in range(1, 5)]
    assert loader.state_dict() == {"epoch": 0, "index": 7}


def test_batches_of_training_are_read_without_polling_stop():
    loader = training_loader(READ, IDS, lambda: True)
    teacher = make_teacher(loader)
    batch = next(make_loader().first_epoch())
    teacher.read(batch, even_parts(len(batch.reset), 1))
    assert torch.isfinite(logits(teacher)).all()


@pytest.mark.parametrize("max_kept_bytes", [0, 2**30])
@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_a_step_that_ran_out_of_memory_is_read_again(num_parts, max_kept_bytes, monkeypatch):
    monkeypatch.setattr(text_training, "MAX_KEPT_BYTES", max_kept_bytes)
    loader = make_loader()
    teacher, calm = make_teacher(loader), make_teacher(loader)
    own, calls = teacher._model.features, []

    def features(tokens, state):
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


def test_logits_beyond_float16_stay_finite():
    model = wide_model()
    with torch.no_grad():
        model.output.bias[3] = -1e6
    loader = make_loader()
    teacher = open_teacher(model, "fp32", loader)
    batch = next(loader.first_epoch())
    teacher.read(batch, even_parts(len(batch.reset), 1))
    assert logits(teacher).min() == -65_504
