"""Random bit flips and truncations over every file of a run: each must be detected before use.

usage: python campaigns/damage.py [--count 1000] [--kind text]
"""

from __future__ import annotations

import argparse
import collections
import random
import shutil
import tempfile
from pathlib import Path

from process import KINDS, checkpoints, finish, make_source, train_command

from fastlstm import Forecaster, SequenceRegressor
from fastlstm.errors import CorruptFileError, FormatError
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.text.files import load_language_model
from fastlstm.training.checkpoint import load_checkpoint

LOAD = {
    "text": load_language_model,
    "forecaster": Forecaster.load,
    "sequence": SequenceRegressor.load,
    "compressed": load_language_model,
}
VERIFIED = ("metrics.jsonl", "compression.json")
"""Files that no model needs: `fastlstm info` checks them."""
READ_BY_NOTHING = ("report.html", ".lock")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--kind", choices=KINDS, default="text")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    results: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        source = make_source(options.kind, base)
        run = base / "run"
        finish(train_command(source, run, "--steps", "40", "--checkpoint-every", "20"))
        files = [
            p
            for p in sorted(run.rglob("*"))
            if p.is_file() and p.name not in READ_BY_NOTHING and "tfevents" not in p.name
        ]
        print(
            f"{len(files)} files: {', '.join(str(p.relative_to(run)) for p in files)}", flush=True
        )
        for _ in range(options.count):
            victim = rng.choice(files)
            whole = victim.read_bytes()
            victim.write_bytes(damaged(whole, rng))
            results[use(run, victim, options.kind)] += 1
            victim.write_bytes(whole)
        shutil.rmtree(run)
    for result, number in results.most_common():
        print(f"{number:5d} {result}")
    raise SystemExit(0 if all(key.startswith("detected") for key in results) else 1)


def damaged(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.3 and data:
        return data[: rng.randrange(len(data))]
    position = rng.randrange(max(len(data), 1))
    return (
        data[:position] + bytes([data[position] ^ (1 << rng.randrange(8))]) + data[position + 1 :]
    )


def use(run: Path, victim: Path, kind: str) -> str:
    """Uses the damaged file the way the commands would; returns what happened."""
    saved = checkpoints(run)
    other = [c.name for c in saved if c != victim.parent]
    try:
        if victim.name in VERIFIED:
            for error in RunDirectory(run).verify():
                raise error
        elif victim.parent == run:
            LOAD[kind](run)
        else:
            try:
                load_checkpoint(victim.parent)
            except CorruptFileError as error:
                raise RunDirectory(run).with_offer(error, besides=victim.parent) from error
    except (CorruptFileError, FormatError) as error:
        named = victim.name in str(error)
        offered = any(name in str(error) for name in other) or victim.parent == run
        if not named:
            return f"NOT NAMED: {victim.name}: {error}"
        return (
            "detected, file named, intact checkpoint offered"
            if offered
            else f"NOT OFFERED: {error}"
        )
    return f"MISSED: {victim.name}"


if __name__ == "__main__":
    main()
