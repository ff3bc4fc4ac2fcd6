"""A forecaster for each group of a table, several at a time, on this machine or on a Ray cluster.

    python examples/model_per_group.py sales.parquet store runs/stores --horizon 28 --steps 2000
    python examples/model_per_group.py sales.parquet store /nfs/stores --horizon 28 --ray auto

Every group is a run directory that all commands take. Started again, finished groups are skipped
and interrupted ones go on. With --ray (pip install ray) OUT must be storage that all nodes share.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from urllib.parse import quote

import joblib
import pandas as pd
import torch

import fastlstm


def train(rows: pd.DataFrame, run: Path, options: dict[str, Any]) -> str:
    """Trains a forecaster on the rows of a group; returns how it ended."""
    torch.set_num_threads(1)  # weights depend on the number of threads
    try:
        model = fastlstm.Forecaster(**options).fit(rows, out=run, resume=True)
    except fastlstm.FastLSTMError as error:
        return f"failed: {error}"
    try:
        error = model.backtest()["forecaster"]
    except fastlstm.FastLSTMError:
        return "trained; its test part is too short for a backtest"
    return f"mae {error['mae']:.4g}, {error['rel_mae']:.2f} of the naive forecast"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("table", type=Path, help="CSV or Parquet")
    parser.add_argument("by", help="the column that names the groups")
    parser.add_argument("out", type=Path)
    parser.add_argument("--horizon", type=int, default=28)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=-1, help="at a time; default one for each core")
    parser.add_argument("--ray", help="address of a cluster, or auto")
    options = parser.parse_args()
    is_csv = options.table.suffix == ".csv"
    frame = pd.read_csv(options.table) if is_csv else pd.read_parquet(options.table)
    settings = {"horizon": options.horizon, "steps": options.steps, "threads": 1}
    groups = [
        (str(name), rows.drop(columns=options.by), options.out / f"group={quote(str(name), '')}")
        for name, rows in frame.groupby(options.by, dropna=False)
    ]
    if options.ray:
        import ray

        ray.init(address=options.ray)
        task = ray.remote(num_cpus=1, max_retries=20)(train)
        results = ray.get([task.remote(rows, run, settings) for _, rows, run in groups])
    else:
        jobs = (joblib.delayed(train)(rows, run, settings) for _, rows, run in groups)
        results = joblib.Parallel(options.jobs)(jobs)
    for (name, _, _), result in zip(groups, results, strict=True):
        print(f"{name}: {result}")


if __name__ == "__main__":
    main()
