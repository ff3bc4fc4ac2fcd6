"""Text written and scored on a GPU: as on the CPU, the same again, whatever the neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_gpu_decoder import SETTINGS, VARIANTS, finish, prompts, started

from fastlstm.text.decoder import Decoder, float_weights
from fastlstm.text.evaluation import evaluate, evaluate_on
from fastlstm.text.gpu_decoder import GpuDecoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def texts(decoder: Any, num: int, room: int, steps: int = 500, **settings: Any) -> Any:
    given = enumerate(prompts(num))
    streams = [started(decoder, p, room, **{"seed": k} | settings) for k, p in given]
    return finish(decoder, streams, steps)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_fp32_writes_the_cpus_texts(random_model: Any, variant: str, settings: str) -> None:
    """Rounding may turn a draw in rare cases; most texts are equal whole."""
    model = random_model(**VARIANTS[variant])
    gpu = GpuDecoder(float_weights(model), model.config, "fp32")
    own = texts(gpu, 40, 60, **SETTINGS[settings])
    want = texts(Decoder.of(model), 40, 60, **SETTINGS[settings])
    assert sum(a == b for a, b in zip(own, want, strict=True)) >= 36


@pytest.mark.parametrize("weights", ["fp32", "fp16", "bf16"])
def test_the_same_again_whatever_the_neighbours(random_model: Any, weights: str) -> None:
    model = random_model(rnn_size=128, num_layers=2, vocab_size=1500)
    decoders = [GpuDecoder(float_weights(model), model.config, weights) for _ in range(2)]
    first = texts(decoders[0], 50, 200)
    assert texts(decoders[1], 50, 200) == first  # again
    assert texts(decoders[1], 50, 200, steps=37) == first  # in other calls
    assert texts(decoders[1], 60, 200)[:50] == first  # beside others, in the same graph


def test_many_streams_and_sizes(random_model: Any) -> None:
    model = random_model(rnn_size=64)
    decoder = GpuDecoder(float_weights(model), model.config, "fp32")
    want = texts(Decoder.of(model), 300, 40, temperature=0.0)
    for num in (1, 2, 8, 9, 64, 65, 300, 3):
        own = texts(decoder, num, 40, temperature=0.0)
        assert sum(a == b for a, b in zip(own, want, strict=False)) >= 0.95 * num


def test_scores_are_the_cpus(random_model: Any) -> None:
    class Tokens:
        token_chars = token_bytes = np.ones(20)

    model = random_model()
    ids = np.random.default_rng(0).integers(0, 20, 5000)
    want = evaluate(model, ids, Tokens(), lanes=8)  # type: ignore[arg-type]
    own = evaluate_on("cuda", model, ids, Tokens(), lanes=8)  # type: ignore[arg-type]
    assert own.nats_per_token == pytest.approx(want.nats_per_token, rel=1e-5)
    assert model.output.bias.device.type == "cpu"
