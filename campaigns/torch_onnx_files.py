"""ONNX files of both of torch's exporters, imported and compared with torch.

usage: .venv/bin/python campaigns/torch_onnx_files.py
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import fastlstm

LIMIT = 1e-5


class Net(nn.Module):
    """Embedding, LSTM of two layers, linear layer; `end` says what of the LSTM is read."""

    def __init__(self, end: str, both: bool, batch_first: bool) -> None:
        super().__init__()
        self.end = end
        self.table = nn.Embedding(9, 6)
        self.lstm = nn.LSTM(6, 5, 2, batch_first=batch_first, bidirectional=both)
        self.out = nn.Linear(10 if both and end != "state" else 5, 9)
        self._time = 1 if batch_first else 0

    def forward(self, x: Tensor) -> Tensor:
        y, (last, _) = self.lstm(self.table(x))
        if self.end == "last":
            y = y.select(self._time, -1)
        if self.end == "state":
            y = last[-1]
        return self.out(y)


def main() -> int:
    torch.manual_seed(0)
    wrong = 0
    cases = itertools.product((False, True), ("steps", "last", "state"), (False, True), (0, 1))
    for dynamo, end, both, batch_first in cases:
        net = Net(end, both, bool(batch_first)).eval()
        options = {"dynamic_axes": {"x": {0: "first", 1: "second"}}}
        if dynamo:
            axes = {1 - batch_first: torch.export.Dim("B")}  # its LSTM freezes the steps
            options = {"dynamic_shapes": (axes,)}
        name = f"{'dynamo' if dynamo else 'script'}, {end}, both {both}, batch first {batch_first}"
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path, x = Path(folder) / "m.onnx", torch.zeros(3, 5, dtype=torch.int64)
            names = {"input_names": ["x"], "dynamo": dynamo}
            torch.onnx.export(net, (x,), path, verbose=False, **names, **options)
            module = fastlstm.import_module(path)
        x = torch.randint(0, 9, (3, 5) if dynamo else (4, 7))
        error = float((module(x) - net(x)).abs().max().detach())
        wrong += error > LIMIT
        print(f"{name:50} largest difference {error:.1e}", flush=True)
    print("all within" if not wrong else f"{wrong} beyond", LIMIT)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
