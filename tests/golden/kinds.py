"""Every kind of training run, each of 20 steps or so: `KINDS`, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence

import fastlstm
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.train import train_forecaster
from golden import material

TEXT: dict[str, Any] = {
    "rnn_size": 8, "embed_size": 6, "num_layers": 1, "batch_size": 4, "seq_length": 8,
    "split": "60/20/20", "steps": 20, "dropout": 0.0, "precision": "fp32", "device": "cpu",
    "tensorboard": False, "sample_every": 0, "log_every": 1, "eval_every": 7, "seed": 3,
    "checkpoint_every": 1000,
}  # fmt: skip
"""420 training tokens, 12 steps an epoch: every run sees the border of an epoch."""
TABLE: dict[str, Any] = {
    "horizon": 4, "input_size": 12, "patch": 4, "hidden_size": 4, "steps": 20, "dropout": 0.0,
    "split": "60,20,20", "batch_size": 8, "evaluations": 4, "seed": 3, "checkpoint_every": 1000,
    "target": "y", "past": ("temp",), "tensorboard": False, "normalize": "last",
}  # fmt: skip
"""45 training windows, 6 steps an epoch, the last of 5 windows."""
SEQUENCE: dict[str, Any] = {
    "hidden_size": 6, "embed_size": 6, "batch_size": 8, "epochs": 4, "seed": 3
}  # fmt: skip
"""40 training sequences, 5 steps an epoch."""


@dataclass
class Outcome:
    """What a run gives back beside what is recorded.

    Attributes:
        evaluations: (step, loss) of each.
        kept: the weights it keeps in the end, by name.
    """

    evaluations: list[tuple[int, float]] = field(default_factory=list)
    kept: dict[str, torch.Tensor] = field(default_factory=dict)

    def observe(self, event):
        if event["event"] == "eval":
            self.evaluations.append((event["step"], event["loss"]))


def text(folder, num_chars=700, **fields):
    """Trains a text model; the weights kept are the published ones."""
    source, found = folder / "text.txt", Outcome()
    source.write_text(material.text(num_chars), encoding="utf-8")
    run = fastlstm.train(
        source, out=folder / "run", observers=[found.observe], **{**TEXT, **fields}
    )
    found.kept = load_file(run.path / "model.safetensors")
    return found


def table(folder, frame=material.table, **fields):
    """Trains a forecaster on a table in memory, without a run directory."""
    found = Outcome()
    ignored = [c for c in frame().column_names if c not in _used({**TABLE, **fields})]
    config = ForecastConfig(**{**TABLE, "ignore": ignored, **fields})
    trained = train_forecaster(frame(), config, observers=[found.observe])
    found.kept = trained.stored.network.state_dict()
    return found


def table_twice(folder):
    """Trains a forecaster on, on another table."""
    found = Outcome()
    config = {**TABLE, "target": ("y",), "past": (), "ignore": _COLUMNS_BUT_Y}
    config = {name: value for name, value in config.items() if name not in _OF_RUNS}
    model = fastlstm.Forecaster(**config).fit(material.table())
    model.set_params(observers=(found.observe,), steps=10, learning_rate=1e-3, eval_every=1)
    model.partial_fit(material.table(110))
    found.kept = model.network_.state_dict()
    return found


def sequences(folder, even, answers, **fields):
    """Trains a regressor of one or two numbers or a classifier of three names."""
    found, X = Outcome(), material.sequences(44, even)
    X = np.stack(X) if even else X
    totals = [float(part[:, 0].sum()) for part in X]
    fields = {**SEQUENCE, "observers": [found.observe], **fields}
    if answers == "names":
        model: Any = fastlstm.SequenceClassifier(**fields)
        model.fit(X, [("low", "mid", "high")[int(total) % 3] for total in totals])
    else:
        y = np.array([[total, len(part)] for total, part in zip(totals, X, strict=True)])
        model = fastlstm.SequenceRegressor(**fields).fit(X, y if answers == "two" else y[:, 0])
    found.kept = model.network_.state_dict()
    return found


def layer(folder, lengths=False, **options):
    """Trains a `fastlstm.LSTM` in a loop of torch, as a user would."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        lstm = fastlstm.LSTM(2, 6, **options)
        model = torch.nn.Sequential(lstm, torch.nn.Linear(6 * (1 + lstm.bidirectional), 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        parts = [torch.from_numpy(part) for part in material.sequences(8, even=not lengths)]
        x, sizes = pad_sequence(parts), torch.tensor([len(part) for part in parts])
        for step in range(20):
            values, given = x.roll(step, 1), {"lengths": sizes.roll(step)} if lengths else {}
            read, _ = lstm(values, **given)
            loss = (model[1](read)[..., 0] - values[..., 1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return Outcome(kept=model.state_dict())


def _used(fields):
    """Returns the columns that a configuration names, and those of series and time."""
    named: set[str] = {"unique_id", "ds"}
    for role in ("target", "past", "future", "static", "categorical"):
        given = fields.get(role) or ()
        named |= {given} if isinstance(given, str) else set(given)
    return named


_COLUMNS_BUT_Y = ("temp", "plan", "day", "shop", "size")
_OF_RUNS = ("checkpoint_every", "evaluations", "tensorboard")
_THREE = partial(material.table, 100, 3)
_ALL_OF_TEXT: dict[str, Any] = {
    "tie_weights": True, "embed_size": 8, "num_layers": 2, "output_norm": True, "residual": True,
    "weight_drop": 0.2, "dropout": 0.2, "ema": 0.9, "accumulate": 2, "batch_size": 2,
    "lane_reset": 0.2,
}  # fmt: skip
_ROLES = {"future": ("plan", "day"), "static": ("shop", "size"), "categorical": ("day", "shop")}
_STREAMS: dict[str, Any] = {
    "tbptt": 8, "batch_size": 3, "split": "40,15,15", "future": ("plan",), "static": ("size",),
}  # fmt: skip
_OUTPUTS: dict[str, dict[str, Any]] = {
    "mse": {"loss": "mse"},
    "huber": {"loss": "huber"},
    "quantiles": {"output": "quantiles"},
    "student t": {"output": "student_t"},
}


def _counted():
    frame = material.table()
    return frame.append_column("count", pa.array(material.counts(len(frame)), pa.int64()))


def _holed():
    return material.holed(material.table(140))


KINDS: dict[str, Callable[[Path], Outcome]] = {
    # text: what is read
    "text": text,
    "text, windows": partial(text, order="windows"),
    "text, lanes reset": partial(text, lane_reset=0.3),
    "text, bytes": partial(text, vocab="byte"),
    "text, bpe": partial(text, num_chars=2000, vocab="bpe", vocab_size=280),
    "text, open choices": partial(
        text, dropout=None, seq_length=None, batch_size=32, eval_every=None, preset="tiny"
    ),
    # text: how steps are taken
    "text, accumulated": partial(text, batch_size=2, accumulate=2),
    # an average starts with short decays, of 0.7 after 20 steps: a longer one would not show
    "text, averaged": partial(text, ema=0.5),
    "text, clipped": partial(text, grad_clip=0.05),
    "text, warm-up and no cool-down": partial(text, warmup=0.4, cooldown=0.0),
    "text, adam": partial(text, optimizer="adam", weight_decay=0.1),
    "text, adamw": partial(text, optimizer="adamw", weight_decay=0.1),
    "text, nadam": partial(text, optimizer="nadam", weight_decay=0.1),
    "text, sgd": partial(text, optimizer="sgd", weight_decay=0.01),
    "text, muon with decay": partial(text, weight_decay=0.1, learning_rate=0.02),
    "text, bf16": partial(text, precision="bf16"),
    # text: when it ends
    "text, epochs": partial(text, steps=None, epochs=1.7),
    "text, patience": partial(text, eval_every=2, patience=2, learning_rate=0.0),
    # text: the model
    "text, three layers": partial(text, num_layers=3),
    "text, output norm, DropConnect, residual": partial(
        text, num_layers=2, output_norm=True, weight_drop=0.3, residual=True, embed_size=8
    ),
    "text, dropout per sequence": partial(text, dropout=0.3, num_layers=2),
    "text, dropout per step": partial(text, dropout=0.3, dropout_kind="plain", num_layers=2),
    "text, tied": partial(text, tie_weights=True, embed_size=8),
    "text, all options": partial(text, **_ALL_OF_TEXT),
    # tables: what is read
    "table": table,
    "table, several series": partial(table, frame=_THREE),
    "table, balanced series": partial(table, frame=_THREE, balance=True),
    "table, missing values": partial(table, frame=_holed, split="84,28,28", gaps="split"),
    "table, missing values and filled gaps": partial(
        table, frame=_holed, split="84,28,28", gaps="fill"
    ),
    "table, known ahead, static, names": partial(table, frame=_THREE, **_ROLES),
    "table, streams": partial(table, tbptt=8, batch_size=2),
    "table, streams of several series": partial(table, frame=_THREE, **_STREAMS),
    "table, streams with missing values": partial(
        table, frame=_holed, tbptt=8, batch_size=2, split="84,28,28", input_size=8, gaps="split"
    ),
    "table, open choices": partial(table, input_size=None, patch=None),
    # tables: the network
    **{f"table, {name}": partial(table, **given) for name, given in _OUTPUTS.items()},
    "table, counts": partial(table, frame=_counted, target="count", output="negative_binomial"),
    "table, standard scale": partial(table, normalize="standard"),
    "table, no scale": partial(table, normalize="none"),
    "table, streams without scale": partial(table, tbptt=8, batch_size=2, normalize="none"),
    "table, segments of 1": partial(table, patch=1),
    "table, segments beyond the horizon": partial(table, patch=6, horizon=8),
    "table, joint targets": partial(table, target=("y", "temp"), past=(), channels="joint"),
    "table, shared targets": partial(table, target=("y", "temp"), past=(), channels="shared"),
    "table, both ways": partial(table, bidirectional=True, num_layers=2),
    "table, dropout": partial(table, dropout=0.4),
    "table, bf16": partial(table, precision="bf16"),
    # tables: how steps are taken, and how many
    "table, averaged": partial(table, ema=0.5),
    "table, not averaged": partial(table, ema=0.0),
    "table, epochs": partial(table, steps=None, epochs=3.4),
    "table, patience": partial(table, patience=2, learning_rate=0.0, evaluations=10),
    "table, trained on": table_twice,
    # sequences
    "sequences": partial(sequences, even=True, answers="one"),
    "sequences, lengths": partial(sequences, even=False, answers="two"),
    "sequences, both ways": partial(
        sequences, even=False, answers="one", bidirectional=True, num_layers=2
    ),
    "sequences, names": partial(sequences, even=False, answers="names", pooling="mean"),
    "sequences, dropout": partial(sequences, even=True, answers="names", dropout=0.3),
    "sequences, averaged": partial(sequences, even=True, answers="one", ema=0.5),
    "sequences, not averaged": partial(sequences, even=True, answers="one", ema=0.0),
    # the layer
    "layer": partial(layer, num_layers=2),
    "layer, both ways, lengths": partial(layer, bidirectional=True, num_layers=2, lengths=True),
    "layer, norm": partial(layer, layer_norm=True, bidirectional=True),
    "layer, recurrent dropout": partial(layer, recurrent_dropout=0.3),
    "layer, zoneout": partial(layer, zoneout=(0.2, 0.1), lengths=True),
    "layer, activations": partial(
        layer, activation="softsign", recurrent_activation="hard_sigmoid"
    ),
    "layer, recomputed": partial(layer, max_activation_bytes=0, num_layers=2),
}
