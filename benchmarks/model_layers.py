"""The LSTM layers of published models, with their sizes: torch's nn.LSTM against ours.

usage: python benchmarks/model_layers.py [--only TEXT] [--seconds 1]
       [--results DIR]     default benchmarks/results/<machine>
Sizes were recorded from models built with their libraries' defaults, on inputs of a usual size
(a second of sound, 64 windows of a table, 16 sentences). A pass without gradients and a training
step, float32 and bf16 (both under the same autocast). Both layers take turns in one process; a
layer that computes something else than torch is not timed. One JSON line per layer, dtype and mode
in model_layers.jsonl: medians, and torch's time by ours as `ratio`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch
from layer_step import LIMITS, Step, autocast, distance, seconds_of, warm_up
from machine import describe_machine, results_folder
from rates import torch_has_bf16
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from fastlstm import LSTM

SAMPLE_S = 5e-3


class Layer(NamedTuple):
    """The layers of a model: T steps, B sequences, I inputs, H units, L layers, D directions."""

    model: str
    T: int
    B: int
    I: int  # noqa: E741
    H: int
    L: int = 1
    D: int = 1
    is_packed: bool = False


LAYERS = (
    Layer("EnCodec 24 kHz, 1 s", 75, 1, 512, 512, L=2),
    Layer("Demucs, 2 s, middle", 21, 1, 512, 512, L=2, D=2),
    Layer("Demucs, 2 s, outer", 88, 1, 64, 64, L=2, D=2),
    Layer("Open-Unmix, 6 s", 255, 1, 512, 256, L=3, D=2),
    Layer("DPRNN-TasNet, inside chunks", 100, 22, 128, 128, D=2),
    Layer("DPRNN-TasNet, across chunks", 22, 100, 128, 128, D=2),
    Layer("SQUIM, inside chunks", 71, 16, 256, 256, D=2),
    Layer("SQUIM, across chunks", 16, 71, 256, 256, D=2),
    Layer("Tacotron 2, encoder", 60, 4, 512, 256, D=2, is_packed=True),
    Layer("speech recognition, SpeechBrain", 200, 4, 320, 512, L=4, D=2, is_packed=True),
    Layer("text recognition, EasyOCR", 99, 8, 256, 256, D=2),
    Layer("tokenizer, Stanza", 50, 16, 100, 200, L=2, D=2, is_packed=True),
    Layer("language identification, Stanza", 100, 16, 100, 100, L=2, D=2),
    Layer("AWD-LSTM, fastai, inner", 70, 32, 1152, 1152),
    Layer("LSTM, NeuralForecast", 96, 32, 1, 200, L=2),
    Layer("DeepAR, NeuralForecast", 96, 32, 1, 128, L=2),
    Layer("temporal fusion transformer", 96, 64, 32, 32),
    Layer("LSTM, tsai", 96, 64, 7, 100, L=2, D=2),
    Layer("TSSequencer, tsai", 64, 128, 96, 96, D=2),
    Layer("RNNModel, Darts", 24, 32, 3, 25, L=2),
    Layer("recurrent PPO, a step of 8 games", 1, 8, 8, 256),
    Layer("recurrent policy, TorchRL", 50, 17, 64, 256, is_packed=True),
)


def built(layer: Layer) -> dict[str, nn.LSTM]:
    """Returns torch's layer and ours with the same weights, peer first."""
    torch.manual_seed(0)
    sizes = layer.I, layer.H, layer.L
    peer, own = (kind(*sizes, bidirectional=layer.D == 2) for kind in (nn.LSTM, LSTM))
    own.load_state_dict(peer.state_dict())
    return {"torch": peer, "fastlstm": own}


def step_of(lstm: nn.LSTM, layer: Layer, dtype: str, *, trains: bool) -> Step:
    """Returns a pass, or forward and backward with gradients of the input and every weight."""
    x = torch.randn(layer.T, layer.B, layer.I, generator=torch.Generator().manual_seed(1))
    given: Tensor | PackedSequence = x.requires_grad_(trains)
    if layer.is_packed:
        lengths = torch.linspace(layer.T, layer.T // 3, layer.B).long()
        packed = pack_padded_sequence(x.detach(), lengths)
        given = packed._replace(data=packed.data.requires_grad_(trains))
    leaves = [given.data if layer.is_packed else x, *lstm.parameters()]

    def step() -> list[Tensor]:
        for leaf in leaves:
            leaf.grad = None
        with torch.set_grad_enabled(trains), autocast(dtype):
            y, _ = lstm(given)
        y = y.data if layer.is_packed else y
        if trains:
            y.backward(torch.ones_like(y))
        return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    return step


def distances(layer: Layer, dtype: str) -> list[float]:
    """Returns the distances of the output and of every gradient from torch's in float32."""
    (_, peer), (_, own) = built(layer).items()
    want = step_of(peer, layer, "fp32", trains=True)()
    found = step_of(own, layer, dtype, trains=True)()
    return [distance(a, b) for a, b in zip(found, want, strict=True)]


def measure(layer: Layer, dtype: str, mode: str, seconds: float) -> dict[str, object]:
    steps = {
        name: step_of(lstm, layer, dtype, trains=mode == "train")
        for name, lstm in built(layer).items()
    }
    repeats = {name: warm_up(step, SAMPLE_S)[1] for name, step in steps.items()}
    found: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found["torch"]) < 5:
        for name, step in steps.items():
            found[name].append(seconds_of(step, repeats[name]))
    median = {name: statistics.median(times) for name, times in found.items()}
    pairs = zip(found["torch"], found["fastlstm"], strict=True)
    return {
        **layer._asdict(), "dtype": dtype, "mode": mode, "median_s": median,
        "ratio": statistics.median(a / b for a, b in pairs), "machine": describe_machine(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one measurement")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    path = (options.results or results_folder()) / "model_layers.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    wrong = []
    for layer in (each for each in LAYERS if options.only in each.model):
        for dtype in ("fp32", "bf16") if torch_has_bf16() else ("fp32",):
            far = [d for d in distances(layer, dtype) if not d <= LIMITS[dtype]]  # NaN is far
            if far:
                wrong.append(f"{layer.model} {dtype}: {far[0]:.1e} from torch's")
                continue
            for mode in ("infer", "train"):
                row = measure(layer, dtype, mode, options.seconds)
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{layer.model} {dtype} {mode}: {row['ratio']:.2f}x", flush=True)
    if wrong:
        raise SystemExit("not measured, as they compute something else:\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
