"""The options of training, callbacks and run directories of `Forecaster`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastlstm
from fastlstm import Forecaster
from fastlstm.errors import ConfigError, KernelError, Stopped
from fastlstm.forecast.plan import LEARNING_RATES
from fastlstm.system.hardware import cpu
from fastlstm.training import signals
from series_frames import long_table

pytestmark = pytest.mark.filterwarnings("ignore:80 % intervals cover")  # after few steps
QUICK: dict[str, Any] = {
    "horizon": 6, "input_size": 24, "patch": 6, "hidden_size": 8, "steps": 12, "dropout": 0.0,
    "split": "60/20/20", "batch_size": 8, "evaluations": 3, "threads": 1, "tensorboard": False,
}  # fmt: skip
OPTIMIZERS = ("muon", "adam", "adamw", "nadam", "sgd")


def waves(num_rows: int = 240, missing: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(0)
    y = np.sin(np.arange(num_rows) * (2 * np.pi / 12)) + 0.1 * rng.normal(size=num_rows)
    y[rng.random(num_rows) < missing] = np.nan
    return y.astype(np.float32)[:, None]


@pytest.mark.parametrize(
    ("missing", "given"),
    [(0.4, {}), (0.0, {"tbptt": 12}), (0.4, {"tbptt": 12})],
    ids=["missing values", "streams", "streams with missing values"],
)
def test_accumulation_gives_the_step_of_the_large_batch(
    missing: float, given: dict[str, Any]
) -> None:
    table = long_table(240, 32, y=np.tile(waves(240, missing)[:, 0], 32))
    found = []
    for sizes in ({"batch_size": 32}, {"batch_size": 8, "accumulate": 4}):
        model = Forecaster(**{
            **QUICK, "target": "y", "steps": 3, "optimizer": "sgd", "learning_rate": 0.05,
            "grad_clip": 1e9, "warmup": 0.0, "cooldown": 0.0, "ema": 0.0, "evaluations": 1,
            **given, **sizes,
        })  # fmt: skip
        found.append(model.fit(table))
    large, parts = (model.network_.state_dict() for model in found)
    for name, tensor in large.items():
        assert torch.allclose(tensor, parts[name], rtol=0, atol=1e-6), name
    assert found[0].fitted_.units == found[1].fitted_.units
    start = Forecaster(**{**QUICK, "target": "y", "steps": 1, "learning_rate": 0.0}, **given)
    before = start.fit(table).network_.state_dict()
    assert max(float((before[name] - large[name]).abs().max()) for name in large) > 1e-3


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_trains(optimizer: str) -> None:
    model = Forecaster(**{**QUICK, "steps": 150}, optimizer=optimizer, ema=0.0).fit(waves())
    found = model.backtest()
    assert found["forecaster"]["mse"] < 0.5 * found["naive"]["mse"]


def test_bf16_learns_as_fp32_does() -> None:
    losses = {}
    for precision in ("fp32", "bf16"):
        model = Forecaster(**{**QUICK, "steps": 60}, precision=precision).fit(waves())
        losses[precision] = model.fitted_.best_loss
        assert model.stored_.config.precision == precision
        assert all(p.dtype == torch.float32 for p in model.network_.parameters())
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.05)


def test_automatic_precision_says_why() -> None:
    events: list[dict[str, Any]] = []
    model = Forecaster(**QUICK, precision="auto", observers=[events.append]).fit(waves())
    start = next(event for event in events if event["event"] == "start")
    assert start["precision"] == model.stored_.config.precision != "auto"
    assert start["precision_why"] not in ("", "as asked")


def test_strict_kernels_refuse_slow_kernels() -> None:
    model = Forecaster(**QUICK, strict_kernels=True)
    if cpu().isa == "scalar":
        with pytest.raises(KernelError, match="would run on a slow path"):
            model.fit(waves())
    else:
        assert model.fit(waves()).network_.lstm.strict


def test_fit_in_a_run_directory_writes_the_files_of_train(tmp_path: Path) -> None:
    out = tmp_path / "run"
    model = Forecaster(**QUICK).fit(waves(), out=out)
    for name in ("config.json", "model.safetensors", "metrics.jsonl", "report.html"):
        assert (out / name).is_file()
    assert (out / "checkpoint-12").is_dir()
    again = Forecaster.load(out)
    np.testing.assert_array_equal(again.predict(waves()), model.predict())
    with pytest.raises(ConfigError, match="`hidden_size=16`: this run was started with 8"):
        Forecaster(**{**QUICK, "hidden_size": 16}).fit(waves(), out=out, resume=True)
    longer = Forecaster(**{**QUICK, "steps": 20}).fit(waves(), out=out, resume=True)
    assert longer.fitted_.steps == 20
    given = json.loads((out / "config.json").read_text())["given"]
    assert given["hidden_size"] == 8
    with pytest.raises(ConfigError, match="`resume=True` continues a run directory; give `out`"):
        Forecaster(**QUICK).fit(waves(), resume=True)


def test_partial_fit_uses_the_rate_of_a_new_optimizer() -> None:
    model = Forecaster(**QUICK).fit(waves())
    rates = []

    class Rate(fastlstm.Callback):
        def on_begin(self, trainer: Any) -> None:
            rates.append(trainer.optimizers.learning_rate)

    model.set_params(optimizer="sgd", callbacks=[Rate()]).partial_fit(waves())
    model.set_params(learning_rate=0.01).partial_fit(waves())
    model.set_params(learning_rate=None, optimizer="adamw").partial_fit(waves())
    assert rates == [LEARNING_RATES["sgd"], 0.01, LEARNING_RATES["adamw"]]


def test_a_signal_saves_the_state_of_a_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals.StopFlag, "__call__", lambda flag: True)
    with pytest.raises(Stopped, match="start the run again with `resume=True` to continue"):
        Forecaster(**QUICK).fit(waves(), out=tmp_path / "run")
    Forecaster(**QUICK).fit(waves())  # without a directory there is nothing to save to
