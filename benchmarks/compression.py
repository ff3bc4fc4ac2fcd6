"""Quality of compressed text models: one source, every way to make it smaller, one evaluator.

usage: python benchmarks/compression.py SOURCE TEXT WAY... [--seed 0] [--threads 1] --work DIR
       [--results DIR]          default benchmarks/results/<machine>
       python benchmarks/compression.py list
SOURCE is trained in DIR unless it is there; --work keeps it for the next call. A way that
compression.jsonl already has, of this source and seed, is skipped. Quality is that of the kernels
that decode, on the validation part. Speeds are not stored: see decode_sparse.py, decode_formats.py.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from machine import describe_machine, results_folder

import fastlstm

RECIPE: dict[str, Any] = {"precision": "bf16", "sample_every": 0, "tensorboard": False}
SOURCES: dict[str, dict[str, Any]] = {
    "shakespeare-512": {"preset": "small", "steps": 1500, "split": "90/10/0"},
    "war-and-peace-1024": {"preset": "medium", "steps": 1400, "split": "90/5/5"},
    "war-and-peace-bpe": {
        "vocab": "bpe", "vocab_size": 4096, "rnn_size": 256, "embed_size": 256, "num_layers": 2,
        "steps": 3000, "split": "90/5/5", "dropout": 0.4,
    },
}  # fmt: skip
SHARES = (0.5, 0.7, 0.75, 0.8, 0.9, 0.95)
TRAINING = {"shakespeare-512": 600, "war-and-peace-1024": 600, "war-and-peace-bpe": 600}
"""Steps in which a source is compressed."""
STUDENTS = (128, 256)
STUDENT_BUDGET = "4m"
"""Of a student, and of the same model alone: run both at once, on a thread each."""


def ways(source: str) -> dict[str, dict[str, Any]]:
    """What is done with a source, by name; `dense` and `alone` are trained without it.

    x2, x3 and x8: for as many times the steps. A dense model is trained for the steps of the source
    and of its compression together, times what makes it take about as long as both of them.
    """
    steps = TRAINING[source]
    total = SOURCES[source]["steps"] + steps
    pruned = {
        f"{structured}-{100 * share:g}": {
            "to": "int8", "prune": share, "structured": structured, "steps": steps,
        }
        for structured in ("blocks", "none", "units")
        for share in SHARES
    }  # fmt: skip
    pruned |= {
        f"{way}-x{times}": {**fields, "steps": times * steps}
        for way, fields in pruned.items()
        for times in (2, 3, 8)
    }
    sizes = (96, 128, 192, 256, 384, 512)
    dense = {f"dense-{size}": {"rnn_size": size, "steps": total} for size in sizes}
    longer = {
        f"dense-{size}-x{times}": {"rnn_size": size, "steps": times * total}
        for size, times in ((128, 8), (192, 5), (256, 3), (384, 2), (512, 3))
    }
    students = {
        f"{kind}-{size}": {"rnn_size": size, "budget": STUDENT_BUDGET}
        for kind in ("student", "alone")
        for size in STUDENTS
    }
    return {
        "int8": {"to": "int8"},
        "fp16": {"to": "fp16"},
        "int4-rounded": {"to": "int4"},
        "int4": {"to": "int4", "steps": steps // 4},
        **pruned,
        **dense,
        **longer,
        **students,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", choices=[*SOURCES, "list"])
    parser.add_argument("text", nargs="?")
    parser.add_argument("ways", nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    if options.source == "list":
        for source in SOURCES:
            print(source, *ways(source))
        return
    if options.text is None or options.work is None:
        parser.error("TEXT and --work DIR are needed: the text, and where runs are kept")
    known = ways(options.source)
    if unknown := [way for way in options.ways if way not in known]:
        parser.error(f"{unknown[0]!r} is no way of {options.source}: {', '.join(known)}")
    path = (options.results or results_folder()) / "compression.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = path.read_text("utf-8").splitlines() if path.exists() else []
    done = {(r["source"], r["seed"], r["way"]) for r in map(json.loads, rows)}
    for way in options.ways:
        if (options.source, options.seed, way) not in done:
            row = measure(options, way, known[way])
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


def measure(options: argparse.Namespace, way: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Compresses the source in one way, or trains a smaller model, and returns what it cost."""
    common = {"seed": options.seed, "threads": options.threads}
    name = f"{options.source}-{options.seed}"
    source, out = options.work / name, options.work / f"{name}-{way}"
    train = {**RECIPE, **SOURCES[options.source], **common}
    if not (source / "config.json").exists():
        fastlstm.train(options.text, out=source, resume=True, **train)
    started = time.perf_counter()
    if way.startswith(("dense-", "alone-")):
        if not (out / "config.json").exists():
            own = {name: value for name, value in train.items() if name not in ("steps", "budget")}
            fastlstm.train(options.text, out=out, resume=True, **{**own, **fields})
        report = fastlstm.compress(out, out=options.work / f"{name}-{way}-int8", to="int8")
    else:
        is_trained = "steps" in fields or "budget" in fields
        trained = {**common, "resume": True, "tensorboard": False} if is_trained else {}
        report = fastlstm.compress(source, out=out, **fields, **trained)
    before, after = report.source, report.result
    change = report.change
    assert change is not None
    return {
        "source": options.source, "seed": options.seed, "way": way, "fields": fields,
        "text": Path(options.text).name, "machine": describe_machine(),
        "bits_per_char": [before.quality, after.quality], "interval": [change.low, change.high],
        "num_scored": change.num_scored, "file_bytes": [before.file_bytes, after.file_bytes],
        "num_parameters": [before.num_parameters, after.num_parameters],
        "num_nonzero": after.num_nonzero, "train": train, "kernel": after.kernel,
        "training": None if report.training is None else vars(report.training),
        "elapsed_s": time.perf_counter() - started,
    }  # fmt: skip


if __name__ == "__main__":
    main()
