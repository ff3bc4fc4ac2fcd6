"""What local steps cost in quality: validation bits per character after equal tokens.

    python campaigns/local_steps.py DIRECTORY TEXT [SEED:EVERY:WIRE ...]

Trains small character models in two processes of a thread each, with `--sync-every EVERY`; without
words, three seeds of 1 (synchronous) and of 25, and one of 100. A line of JSON per run, also
appended to DIRECTORY/results.jsonl, and at the end the differences to the synchronous run of the
same seed, of all lines there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

STEPS = 600
SIZES = "--rnn-size 256 --seq-length 64 --batch-size 64 --threads 1 --nproc 2 --device cpu"
ENDS = f"--steps {STEPS} --eval-every {STEPS} --checkpoint-every {STEPS} --no-tensorboard"
RUNS = [f"{seed}:{every}" for seed in (0, 1, 2) for every in ("1:fp32", "25:fp32")]
RUNS += ["0:100:fp32"]


def main() -> None:
    place, text, wanted = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] or RUNS
    place.mkdir(parents=True, exist_ok=True)
    results = place / "results.jsonl"
    for word in wanted:
        seed, every, wire, *more = word.split(":")
        found = trained(place / "run", text, int(seed), int(every), wire, more)
        line = json.dumps({"seed": int(seed), "every": int(every), "wire": wire, **found})
        print(line, flush=True)
        with results.open("a") as file:
            file.write(line + "\n")
    summarise([json.loads(line) for line in results.read_text().splitlines()])


def trained(
    out: Path, text: Path, seed: int, every: int, wire: str, more: list[str]
) -> dict[str, Any]:
    """Trains a model, and returns its bits per character and its speed."""
    shutil.rmtree(out, ignore_errors=True)
    words = f"{SIZES} {ENDS} --precision bf16 --seed {seed} --sync-every {every} --wire {wire}"
    command = [sys.executable, "-m", "fastlstm", "train", str(text), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, *words.split(), *more], env=environment, check=True, stderr=subprocess.DEVNULL
    )
    lines = (out / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    evaluated = [event for event in events if event["event"] == "eval"][-1]
    ended = events[-1]
    assert evaluated["step"] == STEPS
    shutil.rmtree(out)
    return {
        "bits_per_char": round(evaluated["bits_per_char"], 4),
        "units_per_s": round(ended["units"] / ended["train_s"]),
        **({"more": more} if more else {}),
    }


def summarise(results: list[dict[str, Any]]) -> None:
    """Prints the mean and the paired differences of each kind of run."""
    alone = {r["seed"]: r["bits_per_char"] for r in results if r["every"] == 1}
    kinds = {(r["every"], r["wire"], *r.get("more", ())) for r in results}
    for kind in sorted(kinds):
        own = [r for r in results if (r["every"], r["wire"], *r.get("more", ())) == kind]
        bits = mean(r["bits_per_char"] for r in own)
        lost = [r["bits_per_char"] - alone[r["seed"]] for r in own if r["seed"] in alone]
        told = ", ".join(f"{d:+.4f}" for d in lost)
        print(f"{kind}: {bits:.4f} bits/char of {len(own)}, against synchronous: {told}")


if __name__ == "__main__":
    main()
