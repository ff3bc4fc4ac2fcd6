"""Trains a small SequenceRegressor in a run directory, as the command line trains the others.

usage: python campaigns/sequence_run.py --out RUN [--steps 1500] [--checkpoint-every 3] [--resume]
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from fastlstm import SequenceRegressor
from fastlstm.errors import EXIT_STOPPED, Stopped


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--checkpoint-every", type=int, default=3)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    sequences = [rng.normal(size=(int(n), 3)).astype(np.float32) for n in rng.integers(4, 30, 400)]
    answers = [float(sequence[:, 0].sum()) for sequence in sequences]
    model = SequenceRegressor(
        hidden_size=32, embed_size=16, dropout=0.2, batch_size=8, accumulate=2, threads=1,
        steps=options.steps, checkpoint_every=options.checkpoint_every, patience=0, device="cpu",
    )  # fmt: skip
    try:
        model.fit(sequences, answers, out=options.out, resume=options.resume)
    except Stopped as stop:
        print(stop)
        sys.exit(EXIT_STOPPED)


if __name__ == "__main__":
    main()
