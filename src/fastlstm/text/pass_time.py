"""How long a language model's forward and backward pass takes, by precision."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict

import torch

from fastlstm.system.fields import Precision
from fastlstm.text.model import LanguageModel
from fastlstm.training.precision import PrecisionChoice, allow_tf32, autocast, choose_precision

_TIMED_STEPS = 3


def time_precision(
    asked: Precision, model: LanguageModel, device: torch.device, batch: tuple[int, int]
) -> PrecisionChoice:
    """Returns the precision to train in; `auto` times the candidates on the real model and batch.

    Args:
        asked: what the configuration says.
        model: on its device; its gradients are cleared, its weights and the RNG left alone.
        device: where the steps run.
        batch: (T, B) of one forward pass.
    """
    about = {"model": asdict(model.config), "batch": list(batch)}
    return choose_precision(
        asked, device, about, lambda name: _pass_seconds(model, name, device, batch)
    )


def _pass_seconds(
    model: LanguageModel, name: str, device: torch.device, batch: tuple[int, int]
) -> float:
    allow_tf32(name)
    generator_state = torch.get_rng_state()
    tokens = torch.zeros(batch, dtype=torch.long, device=device)
    seconds = []
    for _ in range(_TIMED_STEPS):
        start = time.perf_counter()
        with autocast(name, device):
            loss, _ = model.loss(tokens, tokens, model.initial_state(batch[1], device=device))
        loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
        model.zero_grad(set_to_none=True)
    torch.set_rng_state(generator_state)
    return statistics.median(seconds[1:])
