"""Training beside two busy processes: does throughput fall in proportion, or does it stall?

usage: python benchmarks/oversubscription.py [--steps 20]
With N cores and two busy processes of one thread each, a fair share of the machine is
N / (N + 2) of what it gave alone. Stores one JSON line in results/<machine>/oversubscription.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

from alternation import Worker
from machine import describe_machine, results_folder
from rates import torch_has_bf16
from shapes import Shape

SHAPE = Shape(128, 512, 1, 32, 128)
BUSY = "while True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    cores = len(os.sched_getaffinity(0))
    result: dict[str, object] = {"shape": SHAPE._asdict(), "machine": describe_machine()}
    result["fair_share"] = cores / (cores + 2)
    for name in ("fastlstm bf16", "fastlstm fp32", "torch bf16", "torch fp32"):
        if name == "torch bf16" and not torch_has_bf16():
            continue
        worker = Worker(name, [sys.executable, "step_worker.py", name, *map(str, SHAPE)])
        if not worker.start():
            continue
        alone = worker.run(steps)
        busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
        try:
            beside = worker.run(steps)
        finally:
            for process in busy:
                process.kill()
                process.wait()
            worker.close()
        share = statistics.median(alone) / statistics.fmean(beside)
        result[name] = {"alone_s": alone, "beside_s": beside, "share": share}
        print(
            f"{name}: alone {statistics.median(alone) * 1e3:.0f} ms, beside two busy processes"
            f" {statistics.fmean(beside) * 1e3:.0f} ms on average, at worst"
            f" {max(beside) * 1e3:.0f}: {100 * share:.0f} % of its speed"
            f" (fair share {100 * cores / (cores + 2):.0f} %)",
            flush=True,
        )
    path = results_folder() / "oversubscription.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
