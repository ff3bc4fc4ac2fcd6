"""Options of a cell: checked values, words, and what counts in evaluation."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import numpy as np

from fastlstm.ops.cell_options import OPTION_NAMES, TORCHS_CELL, CellOptions


def test_options_written_in_other_ways_are_equal():
    both = CellOptions(zoneout=(0.5, 0.5), recurrent_dropout=0.25)
    for zoneout in (0.5, [0.5, 0.5], np.float64(0.5)):
        found = CellOptions(zoneout=zoneout, recurrent_dropout=np.float32(0.25))
        assert (found, hash(found)) == (both, hash(both))
    assert str(both) == "recurrent_dropout=0.25, zoneout=(0.5, 0.5)"
    assert str(TORCHS_CELL) == ""


def test_active_options_in_training_and_evaluation():
    options = CellOptions(
        layer_norm=True, recurrent_dropout=0.1, zoneout=(0, 0.1),
        activation="relu", recurrent_activation="hard_sigmoid",
    )  # fmt: skip
    words = ["layer norm", "zoneout", "activation relu", "recurrent activation hard_sigmoid"]
    assert options.active(training=False) == words
    assert options.active(training=True) == [words[0], "recurrent dropout", *words[1:]]
    assert TORCHS_CELL.active(training=True) == []
    assert options.in_evaluation().recurrent_dropout == 0.0
    assert CellOptions(recurrent_dropout=0.1).in_evaluation() == TORCHS_CELL
    assert TORCHS_CELL.in_evaluation() is TORCHS_CELL


def test_a_larger_configuration_gives_its_options():
    @dataclass(frozen=True, kw_only=True)
    class Config(CellOptions):
        more: int = 5

    found = CellOptions.of(Config(layer_norm=True))
    assert type(found) is CellOptions
    assert found == CellOptions(layer_norm=True)
    in_kernels = {"layer_norm", "recurrent_dropout", "zoneout", "activation"}
    assert set(OPTION_NAMES) == {*in_kernels, "recurrent_activation"}, (
        "kernels take every option as theirs: compute a new one there, or refuse it in `supports`"
        " of ops/backends/native.py and cluster.py and in GraphBuilder.lstm; then add it here"
    )


def test_no_torch_is_loaded():
    code = "import sys, fastlstm.ops.cell_options; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
