# %% [markdown]
# 10^8 rows: made, prepared, trained on, in a gigabyte of memory.
#
#     python examples/large_table.py [ROWS] [FOLDER]      # 2.5 GB on disk, as much in the cache

# %% The generator: a thousand sensors, five values and a time each minute.
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

from fastlstm import Forecaster

rows = int(float(sys.argv[1])) if len(sys.argv) > 1 else 100_000_000
folder = Path(sys.argv[2] if len(sys.argv) > 2 else ".")
SENSORS = 1_000


def sensor(number: int, minutes: int) -> pa.Table:
    """A day's wave, a slow drift and noise in five columns."""
    rng = np.random.default_rng(number)
    steps = np.arange(minutes)
    wave = np.sin(steps * (2 * np.pi / 1440) + number)
    columns = {
        f"y{c}": ((c + 1) * wave + rng.standard_normal(minutes)).astype(np.float32)
        for c in range(5)
    }
    name = pa.array(np.full(minutes, f"sensor-{number:04}"))
    times = np.datetime64("2000-01-01", "us") + steps.astype("timedelta64[m]")
    return pa.table({"unique_id": name, "ds": times, **columns})


path = folder / "sensors.parquet"
if not path.exists():
    first = sensor(0, rows // SENSORS)
    with pq.ParquetWriter(path, first.schema) as writer:
        for number in range(SENSORS):
            writer.write_table(sensor(number, rows // SENSORS))
print(f"{path}: {path.stat().st_size / 1e9:.2f} GB")

# %% Reading it into the cache happens once; windows are never stored.
began = time.perf_counter()
model = Forecaster(
    horizon=60, input_size=480, target=[f"y{c}" for c in range(5)], budget="2m",
    observers=[
        lambda event: print(f"  {event['units_per_s']:,.0f} windows/s, loss {event['loss']:.4f},"
                            f" input wait {event['input_wait_share']:.2%}")
        if event["event"] == "step" and event["step"] % 50 < 5
        else None
    ],
).fit(path)  # fmt: skip
print(f"{time.perf_counter() - began:.0f} s in all")
print(f"waiting for windows: {model.fitted_.input_wait_share:.2%}")

# %% Judged on the test part, a window of every day.
print(model.backtest(stride=1440)["forecaster"])
