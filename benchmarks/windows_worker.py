"""One window pipeline in a process of its own; a step is `BATCHES[candidate]` batches.

usage: python windows_worker.py CANDIDATE     then one number of steps per line on stdin
The question is that of most tutorials: a (200000, 5) float32 series, windows of 50 rows, batches of
64, shuffled.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from alternation import required, serve

ROWS, COLUMNS, LENGTH, BATCH = 200_000, 5, 50, 64
BATCHES = {
    "fastlstm": 40_000,
    "numpy gather": 4_000,
    "torch DataLoader": 800,
    "torch DataLoader, 2 workers": 800,
    "keras timeseries_dataset_from_array": 400,
    "tf.data window().flat_map(batch)": 40,
}


def endless(make: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    while True:
        yield from make()


def batches(name: str, data: np.ndarray) -> Iterator[Any]:
    if name == "fastlstm":
        from fastlstm.forecast.data.window_loader import WindowLoader

        return iter(WindowLoader(data, length=LENGTH, batch_size=BATCH))
    if name == "numpy gather":
        view = np.lib.stride_tricks.sliding_window_view(data, LENGTH, axis=0)
        order = np.random.permutation(len(view))
        starts = range(0, len(order) - BATCH, BATCH)
        return endless(lambda: (view[order[i : i + BATCH]] for i in starts))
    if name.startswith("torch"):
        import torch
        from torch.utils.data import DataLoader, Dataset

        whole = torch.from_numpy(data)

        class Windows(Dataset[torch.Tensor]):
            def __len__(self) -> int:
                return ROWS - LENGTH

            def __getitem__(self, index: int) -> torch.Tensor:
                return whole[index : index + LENGTH]

        workers = 2 if "2" in name else 0
        return endless(lambda: DataLoader(Windows(), BATCH, shuffle=True, num_workers=workers))
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import keras
    import tensorflow as tf

    if name.startswith("keras"):
        found = keras.utils.timeseries_dataset_from_array(
            data[:-LENGTH],
            data[LENGTH:, 0],
            sequence_length=LENGTH,
            batch_size=BATCH,
            shuffle=True,
        )
    else:
        windows = tf.data.Dataset.from_tensor_slices(data).window(
            LENGTH, shift=1, drop_remainder=True
        )
        flat = windows.flat_map(lambda window: window.batch(LENGTH))
        found = flat.shuffle(1000).batch(BATCH).prefetch(tf.data.AUTOTUNE)
    return endless(lambda: found)


def main() -> None:
    name = sys.argv[1]
    rng = np.random.default_rng(0)
    with required(name):
        source = batches(name, rng.normal(size=(ROWS, COLUMNS)).astype(np.float32))
    next(source)

    def step() -> None:
        for _ in range(BATCHES[name]):
            next(source)

    serve(step)


if __name__ == "__main__":
    main()
