"""What a model of each size learns from a number of tokens: complete runs, the data of plans.

usage: python benchmarks/sizes.py TEXT [--sizes 128,256,512] [--layers 1,2] [--tokens 0.5,1,2,4]
                                  [--batch 32]
                                  [--optimizer muon] [--seq-length 128] [--seed 0] [--threads 1]
                                  [--dropout 0.3,0.4]
       [--seconds 23,105,535]  of training steps on 2 threads, in place of --tokens: what budgets of
                               30 s, 2 min and 10 min have for them
       [--rates]               only time the steps; to be run on a quiet machine
       [--precision bf16]      of the timed steps, default fp32; runs choose their own
       [--results DIR]
Every run is one JSON line of sizes.jsonl in DIR (benchmarks/results/<machine>); a run that is
there is not repeated. The number of steps ends a run, so that quality does not depend on speed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine, results_folder

import fastlstm
from fastlstm.text.config import TrainConfig
from fastlstm.text.data.text import prepare_text
from fastlstm.text.plan import LONG, SHORT, SHORT_RUN_TOKENS
from fastlstm.text.size_plan import step_seconds
from fastlstm.training.optimizer import DEFAULT_LEARNING_RATE

RATE_THREADS = 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("text")
    parser.add_argument("--sizes", default="128,192,256,384,512")
    parser.add_argument("--layers", default="1")
    parser.add_argument("--tokens", default="0.5,1,2,4", help="millions")
    parser.add_argument("--seconds", default="")
    parser.add_argument("--rates", action="store_true")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--batch", default="32")
    parser.add_argument("--optimizer", default="muon")
    parser.add_argument("--seq-length", type=int, help="default is that of a plan")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dropout", default="", help="default is that of a plan")
    parser.add_argument("--results")
    options = parser.parse_args()
    path = Path(options.results or results_folder()) / "sizes.jsonl"
    if options.seconds or options.rates:
        for_seconds(options, path)
        return
    for tokens, size, layers, batch, optimizer, dropout in itertools.product(
        map(float, options.tokens.split(",")),
        map(int, options.sizes.split(",")),
        map(int, options.layers.split(",")),
        map(int, options.batch.split(",")),
        options.optimizer.split(","),
        options.dropout.split(","),
    ):
        fields = fields_of(int(tokens * 1e6), size, layers, batch, optimizer, options.seq_length)
        fields |= {"seed": options.seed, "threads": options.threads}
        run(options.text, fields | ({"dropout": float(dropout)} if dropout else {}), path)


def for_seconds(options: argparse.Namespace, path: Path) -> None:
    """Trains each size for as many steps as fit into the times."""
    sizes = list(
        itertools.product(map(int, options.sizes.split(",")), map(int, options.layers.split(",")))
    )
    stored = path.with_name("size_rates.jsonl")
    rates = [tokens_per_s(options.text, *size, options.precision, stored) for size in sizes]
    for seconds in () if options.rates else map(float, options.seconds.split(",")):
        for size, rate in zip(sizes, rates, strict=True):
            fields = fields_of(int(seconds * rate), *size, 32, "muon", options.seq_length)
            fields |= {"seed": options.seed, "threads": options.threads}
            run(options.text, fields, path)


def tokens_per_s(text: str, size: int, layers: int, precision: str, path: Path) -> float:
    """Returns the speed of training steps of a size on 2 threads, measured now or earlier."""
    key = {"text": Path(text).name, "rnn_size": size, "num_layers": layers, "precision": precision}
    if path.exists():
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            if {"precision": "fp32", "num_layers": 1, **row}.items() >= key.items():
                return float(row["tokens_per_s"])
    torch.set_num_threads(RATE_THREADS)
    data = prepare_text(text)
    fields = fields_of(32 * LONG, size, layers, 32, "muon", LONG)
    config = TrainConfig(**{**fields, "precision": precision})
    seconds = min(step_seconds(config, data.ids, data.tokenizer) for _ in range(3))
    rate = 32 * LONG / seconds
    row = {**key, "tokens_per_s": rate}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**row, "machine": describe_machine()}) + "\n")
    print(f"{layers} x {size} units: {rate:,.0f} tokens/s", flush=True)
    return rate


def fields_of(
    tokens: int, size: int, layers: int, batch: int, optimizer: str, length: int | None
) -> dict[str, Any]:
    """Returns the options of one run."""
    length = length or (SHORT if tokens < SHORT_RUN_TOKENS else LONG)
    width = 64 if size < 256 else 128 if size <= 640 else 256
    rate = {} if optimizer == "muon" else {"learning_rate": DEFAULT_LEARNING_RATE[optimizer]}
    depth = {} if layers == 1 else {"num_layers": layers}
    return {
        **rate, **depth,
        "split": "90/5/5", "rnn_size": size, "embed_size": width, "batch_size": batch,
        "seq_length": length, "optimizer": optimizer, "steps": tokens // (batch * length),
    }  # fmt: skip


def run(text: str, fields: dict[str, Any], path: Path) -> None:
    """Trains one model, unless the file has its result."""
    key = {"text": Path(text).name, "fields": fields}
    if path.exists():
        rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        if any({name: row[name] for name in key} == key for row in rows):
            return
    events: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        fastlstm.train(
            text, out=Path(folder) / "run", observers=[events.append], tensorboard=False,
            sample_every=0, **fields,
        )  # fmt: skip
    start = next(e for e in events if e["event"] == "start")
    end = next(e for e in events if e["event"] == "end")
    result = {
        **key,
        "bits_per_char": end["best_bits_per_char"],
        "tokens": end["units"],
        "best_share": end["best_step"] / end["step"],
        "train_tokens": start["num_units"]["train"],
        "num_parameters": start["num_parameters"],
        "dropout": start["dropout"],
        "train_s": end["train_s"],
        "machine": describe_machine(),
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")
    print(f"{fields}: {result['bits_per_char']:.4f} bits/char", flush=True)


if __name__ == "__main__":
    main()
