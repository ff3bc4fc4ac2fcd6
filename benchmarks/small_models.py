"""Small models as people build them, with nn.LSTM and accelerated: what is left of a kernel's gain?

usage: python benchmarks/small_models.py [--rounds 9] [--only TEXT]
       [--results DIR]     default benchmarks/results/<machine>
Each model is timed whole, in float32 on one thread: a training step (forward, backward, Adam) and a
pass without gradients. Both copies take turns in one process; a sample lasts 5 ms or more. A model
whose gradients are not torch's is not timed. One JSON line per model in small_models.jsonl: medians
and torch's time by ours as `ratio`.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from layer_step import Step, seconds_of, warm_up
from machine import describe_machine, results_folder
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fastlstm

SAMPLE_S = 5e-3
LIMIT = 1e-4


class Keywords(nn.Module):
    """Keyword spotting: one second of 40 filter banks, the last output names the word."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(40, 128, batch_first=True), nn.Linear(128, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0][:, -1])


class Agent(nn.Module):
    """A recurrent agent, as in DRQN and recurrent PPO: features, an LSTM, values of actions."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, hidden), nn.ReLU())
        self.rnn, self.out = nn.LSTM(hidden, hidden), nn.Linear(hidden, 5)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(2, 1, x.shape[1], self.rnn.hidden_size)
        return self.out(self.rnn(self.encoder(x), (state[0], state[1]))[0])


class Tagger(nn.Module):
    """Tags the words of sentences, read both ways; batches of several are packed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5000, 100)
        self.rnn = nn.LSTM(100, 100, bidirectional=True, batch_first=True)
        self.out = nn.Linear(200, 17)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        if len(x) == 1:
            return self.out(self.rnn(x)[0])
        lengths = torch.linspace(words.shape[1], 5, len(x)).long()
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        return self.out(pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])


class Translator(nn.Module):
    """An encoder and a decoder that is stepped word by word."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(3000, 64), nn.Embedding(3000, 64)
        self.encoder, self.decoder = nn.LSTM(64, 128), nn.LSTM(64, 128)
        self.out = nn.Linear(128, 500)

    def forward(self, words: Tensor) -> Tensor:
        _, state = self.encoder(self.source(words))
        outputs = []
        for word in words:
            y, state = self.decoder(self.target(word[None]), state)
            outputs.append(self.out(y))
        return torch.cat(outputs)


class Forecast(nn.Module):
    """The tutorial's forecaster: two layers with dropout over 60 values of one series."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(1, 50, 2, dropout=0.2, batch_first=True)
        self.out = nn.Linear(50, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0][:, -1])


class Job(NamedTuple):
    """A model and its input."""

    name: str
    build: Callable[[], nn.Module]
    input: Callable[[], Tensor]


def words(*sizes: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, 3000, sizes)


def values(*sizes: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(sizes)


JOBS = (
    Job("keywords B=1 T=98 I=40 H=128", Keywords, values(1, 98, 40)),
    Job("keywords B=32 T=98 I=40 H=128", Keywords, values(32, 98, 40)),
    Job("drqn T=1 B=1 H=64", lambda: Agent(16, 64), values(1, 1, 16)),
    Job("drqn T=8 B=32 H=64", lambda: Agent(16, 64), values(8, 32, 16)),
    Job("drqn T=80 B=4 H=64", lambda: Agent(16, 64), values(80, 4, 16)),
    Job("ppo T=1 B=8 H=256", lambda: Agent(24, 256), values(1, 8, 24)),
    Job("ppo T=16 B=16 H=256", lambda: Agent(24, 256), values(16, 16, 24)),
    Job("tagger B=1 T=25 H=100", Tagger, words(1, 25)),
    Job("tagger B=16 T=25 H=100, packed", Tagger, words(16, 25)),
    Job("translator B=1 T=12 H=128", Translator, words(12, 1)),
    Job("translator B=16 T=12 H=128", Translator, words(12, 16)),
    Job("forecast B=32 T=60 H=50", Forecast, values(32, 60, 1)),
)


def distance(models: dict[str, nn.Module], x: Tensor) -> float:
    """Returns how far the gradients of one step are from torch's, at most."""
    for model in models.values():
        torch.manual_seed(1)
        model.zero_grad()
        model(x).square().mean().backward()
    pairs = zip(*(model.parameters() for model in models.values()), strict=True)
    return max(float((b.grad - a.grad).norm() / (a.grad.norm() + 1e-6)) for a, b in pairs)


def training_step(model: nn.Module, x: Tensor) -> Step:
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def inference_step(model: nn.Module, x: Tensor) -> Step:
    model = copy.deepcopy(model).eval()

    def step() -> None:
        with torch.no_grad():
            model(x)

    return step


def measure(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Returns the median seconds of every step, taken in turn."""
    repeats = {name: warm_up(step, SAMPLE_S)[1] for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name].append(seconds_of(step, repeats[name]))
    return {name: statistics.median(found) for name, found in seconds.items()}


def run(job: Job, rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    theirs, x = job.build(), job.input()
    models = {"torch": theirs, "fastlstm": fastlstm.accelerate(copy.deepcopy(theirs))}
    far = distance(models, x)
    if not far <= LIMIT:
        print(f"not measured, {job.name}: gradients are {far:.1e} from torch's")
        return []
    rows = []
    for mode, make in (("infer", inference_step), ("train", training_step)):
        median = measure({name: make(model, x) for name, model in models.items()}, rounds)
        ratio = median["torch"] / median["fastlstm"]
        row = {"model": job.name, "mode": mode, "median_s": median, "ratio": ratio}
        rows.append({**row, "rounds": rounds, "machine": describe_machine()})
        shown = ", ".join(f"{name} {1e6 * s:.0f} us" for name, s in median.items())
        print(f"{job.name} {mode}: {shown}, {ratio:.2f}x", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="models whose name has this, as 'drqn'")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = (options.results or results_folder()) / "small_models.jsonl"
    chosen = [job for job in JOBS if options.only in job.name]
    found = [run(job, options.rounds) for job in chosen]
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(row)}\n" for rows in found for row in rows)
    if not all(found):
        sys.exit("a model computes something else than torch; no speed for it")


if __name__ == "__main__":
    main()
