"""Plants bottlenecks in training runs and looks whether `fastlstm profile` finds them.

usage: python campaigns/profile_plants.py RESULTS.jsonl TEXT TABLE.csv [NAME...]
Every plant is one line with the ranks of its causes and the measured gains; a plant
that is there is not repeated. Controls are runs with nothing planted: they must get no
recommendation. Without names all commands that were printed are run afterwards, with those of other
profiles (printed_commands.py), into printed_commands.jsonl beside RESULTS. It can be ended at any
time, and goes on where it was. The last lines sum up the files.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from printed_commands import ends_by_exception, rows_of, run_all

from fastlstm.cli.main import main as fastlstm
from fastlstm.system import hardware

SMALL = ["--rnn-size", "256", "--embed-size", "128", "--seq-length", "64", "--batch-size", "32"]
TEXT = [*SMALL, "--precision", "faster", "--steps", "2000"]
TABLE = ["--horizon", "96", "--target", "OT", "--steps", "2000", "--precision", "faster"]
Plant = tuple[str, tuple[str, ...], list[str], Callable[[], Any] | None]
"""Name, causes, options, what changes the program."""


def slow_loader() -> None:
    """Every batch takes 40 ms longer, after it was made."""
    from fastlstm.forecast.data.window_loader import WindowLoader
    from fastlstm.text.data.lanes import TextLoader

    def slowed(take: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def next_batch(self: Any) -> Any:
            time.sleep(0.04)
            return take(self)

        return next_batch

    for loader in (TextLoader, WindowLoader):
        loader.next = slowed(loader.next)  # type: ignore[method-assign,assignment]


def slow_disk() -> None:
    """Every checkpoint takes half a second longer."""
    from fastlstm.training.checkpoint import Saver

    save = Saver.save

    def slow(self: Saver) -> None:
        time.sleep(0.5)
        save(self)

    Saver.save = slow  # type: ignore[method-assign]


def text(name: str, causes: str, *options: str, plant: Callable[[], Any] | None = None) -> Plant:
    return f"text {name}", tuple(causes.split("|")), [*TEXT, *options], plant


def table(name: str, causes: str, *options: str, plant: Callable[[], Any] | None = None) -> Plant:
    return f"table {name}", tuple(causes.split("|")), [*TABLE, *options], plant


PLANTS: list[Plant] = [
    text("one thread", "threads", "--threads", "1"),
    text("eight threads", "threads", "--threads", "8"),
    text("slow loader", "input", plant=slow_loader),
    text("batch of 1", "batch size", "--batch-size", "1"),
    text("batch of 4", "batch size", "--batch-size", "4"),
    text("batch of 512", "batch size", "--batch-size", "512", "--steps", "150"),
    text("sequences of 8", "sequence length", "--seq-length", "8"),
    text("evaluation every 5 steps", "evaluation", "--eval-every", "5"),
    text("checkpoint every 5 steps", "checkpoints", "--checkpoint-every", "5"),
    text("slow disk", "checkpoints", "--checkpoint-every", "20", plant=slow_disk),
    text("adamw", "optimizer", "--optimizer", "adamw"),
    text("accumulation of 8", "accumulation", "--batch-size", "4", "--accumulate", "8"),
    text("learning rate x 30", "learning rate", "--learning-rate", "0.3", "--rnn-size", "128"),
    text("wide output", "output layer", "--vocab", "bpe", "--vocab-size", "12000",
         "--rnn-size", "128", "--embed-size", "64"),
    table("one thread", "threads", "--threads", "1"),
    table("eight threads", "threads", "--threads", "8"),
    table("slow loader", "input", plant=slow_loader),
    table("batch of 2", "batch size", "--batch-size", "2"),
    table("evaluation every 5 steps", "evaluation", "--eval-every", "5"),
    table("checkpoint every 5 steps", "checkpoints", "--checkpoint-every", "5"),
    table("muon", "optimizer", "--optimizer", "muon"),
    table("accumulation of 8", "accumulation", "--batch-size", "4", "--accumulate", "8"),
    table("slow disk", "checkpoints", "--checkpoint-every", "20", plant=slow_disk),
    text("one thread and a batch of 2", "threads&batch size", "--threads", "1",
         "--batch-size", "2"),
    text("one thread and evaluations", "threads&evaluation", "--threads", "1",
         "--eval-every", "5"),
    text("slow loader and checkpoints", "input&checkpoints", "--checkpoint-every", "5",
         plant=slow_loader),
    text("sequences of 8 and eight threads", "sequence length&threads", "--threads", "8",
         "--seq-length", "8"),
    table("accumulation and one thread", "accumulation&threads", "--batch-size", "4",
          "--accumulate", "8", "--threads", "1"),
]  # fmt: skip
if hardware.bf16_instructions() is not None:
    PLANTS += [
        text("the slower precision", "precision", "--precision", "slower"),
        table("the slower precision", "precision", "--precision", "slower"),
    ]
CONTROLS: list[Plant] = [
    text("control, 256 units", ""),
    text("control, 128 units", "", "--rnn-size", "128", "--embed-size", "64"),
    text("control, 512 units, long sequences", "", "--rnn-size", "512", "--seq-length", "128"),
    text("control, chosen by a budget", "", "--budget", "2m"),
    table("control", ""),
    table("control, small", "", "--hidden-size", "64", "--input-size", "96"),
]


def main() -> None:
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    path, (text_file, table_file) = Path(sys.argv[1]), map(os.path.abspath, sys.argv[2:4])
    known = {row["name"] for row in rows_of(path)}
    ends_by_exception()
    for plant in (*PLANTS, *CONTROLS):
        name = plant[0]
        if name in known or (sys.argv[4:] and name not in sys.argv[4:]):
            continue
        # A process of its own: a plant changes the program.
        argv = [sys.executable, __file__, "--one", name, text_file, table_file]
        done = subprocess.run(argv, capture_output=True, text=True)
        if done.returncode:
            print(f"{name}: {done.stderr.strip().splitlines()[-1:]}", flush=True)
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(line(row), flush=True)
    report(rows_of(path))
    if not sys.argv[4:]:
        run_all(path.with_name("printed_commands.jsonl"), [], rows_of(path))


def one(name: str, text_file: str, table_file: str) -> None:
    """Profiles one plant and prints a row."""
    _, causes, options, plant = next(p for p in (*PLANTS, *CONTROLS) if p[0] == name)
    if "--budget" in options:
        options = [word for word in TEXT if word not in (*SMALL, "--steps", "2000")]
        options += ["--budget", "2m"]
    precisions = _precisions()
    options = [precisions.get(word, word) for word in options]
    if plant is not None:
        plant()
    source = text_file if name.startswith("text") else table_file
    began, printed = time.perf_counter(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = fastlstm(["profile", source, *options, "--json"])
    if status:
        sys.exit(status)
    seconds, said = time.perf_counter() - began, json.loads(printed.getvalue().splitlines()[-1])
    commands = [verdict["command"] for verdict in said["verdicts"] if verdict["command"]]
    # In the order printed: what is recommended, then what tune is to try.
    ranked = [v["cause"] for v in said["verdicts"] if v["is_recommended"] or v["is_to_try"]]
    gains = {v["cause"]: v["gain"] for v in said["verdicts"]}
    wanted = [cause for part in causes for cause in part.split("&") if cause]
    print(json.dumps({
        "name": name, "causes": wanted, "recommended": ranked,
        "ranks": [ranked.index(c) + 1 if c in ranked else None for c in wanted], "gains": gains,
        "seconds": seconds, "others": said["others"], "commands": commands,
    }))  # fmt: skip


def _precisions() -> dict[str, str]:
    """Returns what is faster and slower on this machine, for these runs."""
    from fastlstm.system import hardware

    cpu = hardware.cpu()
    is_fast = cpu.isa == "amx_bf16" or (cpu.isa == "avx512_bf16" and cpu.bf16_isa == cpu.isa)
    names = ("bf16", "fp32") if is_fast else ("fp32", "bf16")
    return dict(zip(("faster", "slower"), names, strict=True))


def line(row: dict[str, Any]) -> str:
    """Returns one plant as text."""
    said = ", ".join(f"{c} {100 * row['gains'][c]:+.0f} %" for c in row["recommended"]) or "nothing"
    return (
        f"{row['name']}: ranks {row['ranks']}; said {said}; {row['seconds']:.0f} s,"
        f" others {100 * (row['others'] or 0):.0f} %"
    )


def report(rows: list[dict[str, Any]]) -> None:
    """Prints what all rows come to."""
    single = [row for row in rows if len(row["causes"]) == 1]
    pairs = [row for row in rows if len(row["causes"]) == 2]
    controls = [row for row in rows if not row["causes"]]
    first = sum(row["ranks"] == [1] for row in single)
    second = sum(row["ranks"][0] in (1, 2) for row in single)
    both = sum(None not in row["ranks"] for row in pairs)
    quiet = sum(not row["recommended"] for row in controls)
    print(f"{len(single)} plants: {first} first, {second} in the first two")
    print(f"{len(pairs)} pairs: both causes recommended in {both}")
    print(f"{len(controls)} controls: nothing recommended in {quiet}")
    seconds = sorted(row["seconds"] for row in rows)
    print(f"seconds: median {seconds[len(seconds) // 2]:.0f}, longest {seconds[-1]:.0f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(*sys.argv[2:5])
    else:
        main()
