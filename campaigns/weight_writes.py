"""Random writes to weights between calls: every result is that of torch's `nn.LSTM`.

usage: python campaigns/weight_writes.py [--writes 10000] [--seed 0]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from weight_writes import WRITES, campaign

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--writes", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    campaign(chosen.writes, chosen.seed)
    print(f"{chosen.writes:,} writes by {len(WRITES)} routes: each was seen by the next call")
