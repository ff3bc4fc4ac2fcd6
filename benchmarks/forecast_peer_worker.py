"""neuralforecast's LSTM on a table: validation loss over time and the errors on the test windows.

usage: python benchmarks/forecast_peer_worker.py TABLE HORIZON INPUT TRAIN_ROWS SECONDS
Run by forecast_peer.py with an interpreter that has neuralforecast. Prints one JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, ClassVar

import numpy as np
import pandas as pd

try:
    from neuralforecast import NeuralForecast
    from neuralforecast.models import LSTM
    from pytorch_lightning.callbacks import Callback
except ImportError as error:
    sys.exit(f"neuralforecast: {error}")

VALIDATION_EVERY = 50


class Clock(Callback):  # type: ignore[misc]
    """Notes when each validation ended, and what it said.

    The model, and this with it, is copied before it is trained: the notes are the class'.
    """

    began = 0.0
    curve: ClassVar[list[tuple[float, int, float]]] = []

    def on_train_start(self, trainer: Any, model: Any) -> None:
        Clock.began = time.perf_counter()

    def on_validation_end(self, trainer: Any, model: Any) -> None:
        if model.valid_trajectories and trainer.global_step > 0:
            step, loss = model.valid_trajectories[-1]
            self.curve.append((time.perf_counter() - Clock.began, int(step), float(loss)))


def main() -> None:
    path, horizon, input_size, train_rows, seconds = sys.argv[1], *map(int, sys.argv[2:6])
    table = pd.read_csv(path)
    names = [name for name in table.columns if name != "date"]
    third = train_rows // 3
    values = table[names].to_numpy(dtype=np.float64)[: train_rows + 2 * third]
    values = (values - values[:train_rows].mean(0)) / values[:train_rows].std(0)
    steps = np.arange(len(values))
    frames = [
        pd.DataFrame({"unique_id": name, "ds": steps, "y": values[:, c]})
        for c, name in enumerate(names)
    ]
    model = LSTM(
        h=horizon, input_size=input_size, max_steps=1_000_000, val_check_steps=VALIDATION_EVERY,
        random_seed=0, alias="peer", max_time={"seconds": seconds}, callbacks=[Clock()],
        enable_progress_bar=False, logger=False, enable_checkpointing=False,
    )  # fmt: skip
    forecaster = NeuralForecast(models=[model], freq=1)
    found = forecaster.cross_validation(
        pd.concat(frames), val_size=third, test_size=third, n_windows=None, step_size=1
    )
    error = (found["peer"] - found["y"]).to_numpy()
    print(
        json.dumps(
            {
                "curve": Clock.curve,
                "mse": float((error**2).mean()),
                "mae": float(np.abs(error).mean()),
                "windows": len(error) // horizon // len(names),
            }
        )
    )


if __name__ == "__main__":
    main()
