"""Tokens per second that the GPU decoder writes, beside the CPU decoder's.

    python benchmarks/gpu_generation.py [--units 512] [--vocab 100] [--layers 1] [--weights fp16]

Medians of `--rounds` calls after a warm-up; a round is 256 tokens of every stream, through
`Decoder.run` and `Stream.take` ("raw") and through `write_all` with texts ("texts"). With
`--simulated` it measures what surrounds the kernels, without a GPU (simulated_gpu.py).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import simulated_gpu
import torch

from fastlstm.text.config import ModelConfig
from fastlstm.text.data.tokenizer import CharTokenizer
from fastlstm.text.decoder import Decoder, float_weights
from fastlstm.text.gpu_decoder import GpuDecoder
from fastlstm.text.model import LanguageModel
from fastlstm.text.sampling import Sampling
from fastlstm.text.writing import Text, write_all

STEPS = 256


def streams_of(decoder: Decoder, num: int, room: int, **settings: Any) -> list[Any]:
    streams = [decoder.stream() for _ in range(num)]
    for seed, stream in enumerate(streams):
        stream.set(Sampling(seed=seed, **settings))
        stream.feed([0])
        stream.begin(room)
    return streams


def median_s(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


def raw_rate(decoder: Decoder, num: int, rounds: int, steps: int, **settings: Any) -> float:
    streams = streams_of(decoder, num, 1 << 30, **settings)

    def call() -> None:
        decoder.run(streams, steps)
        for stream in streams:
            stream.take()

    call()
    return num * steps / median_s(call, rounds)


def text_rate(decoder: Decoder, tokenizer: Any, num: int, room: int) -> float:
    def call() -> None:
        texts = [Text(s, tokenizer.stream_decoder()) for s in streams_of(decoder, num, room)]
        for _ in write_all(decoder, texts):
            pass

    call()
    return num * room / median_s(call, 3)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in (("units", 512), ("vocab", 100), ("layers", 1), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--weights", default="fp16")
    parser.add_argument("--cpu", action="store_true", help="measure the CPU decoder, too")
    parser.add_argument("--simulated", action="store_true")
    options = parser.parse_args()
    if options.simulated:
        simulated_gpu.install()
    elif not torch.cuda.is_available():
        print("no NVIDIA GPU that torch can use: nothing was measured")
        return
    torch.manual_seed(0)
    sizes = options.vocab, min(128, options.units), options.units
    model = LanguageModel(ModelConfig(*sizes, num_layers=options.layers)).eval()
    tokenizer = CharTokenizer("".join(chr(0x100 + k) for k in range(options.vocab)))
    gpu = GpuDecoder(float_weights(model), model.config, options.weights)
    print(gpu.describe(1024), flush=True)
    for num in (1, 8, 64, 256, 1024, 4096):
        start_s = time.perf_counter()
        raw_rate(gpu, num, 1, STEPS)
        first_s = time.perf_counter() - start_s
        shown = {
            "plain": raw_rate(gpu, num, options.rounds, STEPS),
            "greedy": raw_rate(gpu, num, options.rounds, STEPS, temperature=0.0),
            "top-p 0.9, top-k 40": raw_rate(gpu, num, options.rounds, STEPS, top_p=0.9, top_k=40),
            "texts": text_rate(gpu, tokenizer, num, 4 * STEPS),
            "long texts": text_rate(gpu, tokenizer, num, 64 * STEPS),
        }
        rates = ", ".join(f"{name} {rate / 1e3:,.0f}" for name, rate in shown.items())
        print(f"{num:5} streams, thousand tokens/s: {rates}; first {first_s:.2f} s", flush=True)
        if options.cpu:
            cpu = Decoder.of(model, "int8")
            print(f"      CPU int8: {raw_rate(cpu, num, 3, 64) / 1e3:,.0f}", flush=True)


if __name__ == "__main__":
    main()
