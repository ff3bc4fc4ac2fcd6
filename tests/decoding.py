"""Streams of a decoder for tests: started in one line, and run to their ends."""

import torch

from fastlstm.system import environment, hardware
from fastlstm.text.sampling import Sampling

ISAS = environment.ISA_NAMES[: environment.ISA_NAMES.index(hardware.cpu().isa) + 1]
"""The instruction sets of this CPU."""
KERNELS = [*ISAS, "avx512 without vnni", "avx2 without vnni"]


def tokens_of(N, V=20, seed=0):
    """Returns N random tokens."""
    return torch.randint(V, (N,), generator=torch.Generator().manual_seed(seed)).tolist()


def started(decoder, prompt, room, stops=(), *, num_top=None, scores_given=False, **settings):
    """Returns a stream that is to read a prompt and write `room` tokens; the default seed is 7."""
    stream = decoder.stream()
    sampling = Sampling(**{"seed": 7} | settings)
    stream.set(sampling, stops=stops, num_top=num_top, scores_given=scores_given)
    stream.feed(prompt)
    stream.begin(room)
    return stream


def finish(decoder, streams, steps=50):
    """Runs streams to their ends; returns the tokens of each."""
    written: list[list[int]] = [[] for _ in streams]
    while any(stream.is_running for stream in streams):
        decoder.run(streams, steps)
        for stream, tokens in zip(streams, written, strict=True):
            tokens += stream.take().tolist()
    return written
