"""The figures of a run: what is the same on every machine, and what is so but for rounding."""

import hashlib
import json
import math
import platform
from contextlib import contextmanager
from os import environ
from pathlib import Path
from unittest import mock

import numpy as np
import torch

import recorded_cpus
from fastlstm.system import hardware
from golden.kinds import KINDS
from golden.recording import recorded

FILE = Path(__file__).with_name("figures.json")
EXACT = ("steps", "data", "random", "settings", "rates", "evaluated")
"""Equal on every machine: how many steps, SHA-256 of the batches and of the state of the random
numbers, the optimizers' constants, the learning rates, the steps of the evaluations."""
DRAWN, LOSS, WEIGHTS = 1e-5, 2e-5, 5e-4
"""How far off initial weights and trained ones may be, as a share of a tensor's norm, and losses,
relative: 12, 4 and 20 times what instruction sets and threads were seen to differ by."""
BF16 = 5e-3
"""The same of both where products are rounded to bf16."""
_GOLDEN = 2654435761


def figures_of(kind, folder):
    """Trains a kind of run and returns its figures as plain values."""
    # Linear layers in bf16 as well, slow as torch multiplies it on some CPUs.
    linear = mock.patch.object(hardware, "has_bf16_products", return_value=True)
    with without_bf16(), linear, recorded() as recording:
        outcome = KINDS[kind](folder)
    return _figures(recording, outcome.evaluations, outcome.kept)


@contextmanager
def without_bf16():
    """Hides bf16 instructions: where a CPU has them, Muon's products are rounded to bf16."""
    cpu = hardware.cpu()
    if not {"avx512_bf16", "amx_bf16"} & cpu.features:
        yield
        return
    found = recorded_cpus.detected("avx512" if cpu.isa in ("avx512_bf16", "amx_bf16") else cpu.isa)
    asked = {"FASTLSTM_ISA": ""}
    try:
        with (
            mock.patch.object(hardware, "_detected", return_value=found),
            mock.patch.dict(environ, asked),
        ):
            hardware._described.cache_clear()
            yield
    finally:
        hardware._described.cache_clear()


def _figures(recording, evaluations, kept):
    return {
        "steps": len(recording.losses),
        "data": recording.data,
        "random": recording.random,
        "settings": recording.settings,
        "rates": [[float(f"{rate:.10g}") for rate in step] for step in recording.rates],
        "evaluated": [step for step, _ in evaluations],
        "losses": [_rounded(loss) for loss in recording.losses],
        "evaluations": [_rounded(loss) for _, loss in evaluations],
        "initial": {name: fingerprint(t) for name, t in recording.initial.items()},
        "trained": {name: fingerprint(t) for name, t in recording.trained.items()},
        "kept": {name: fingerprint(t) for name, t in sorted(kept.items())},
    }


def fingerprint(tensor):
    """Returns the norm of a tensor, its sum, and its product with a fixed row of numbers.

    The third tells where a value stands: two values that change places change nothing else.
    """
    flat = np.nan_to_num(tensor.detach().double().numpy().ravel(), nan=3.0, posinf=2.0, neginf=-2.0)
    places = np.arange(1, len(flat) + 1, dtype=np.uint64) * np.uint64(_GOLDEN) % np.uint64(1 << 32)
    row = places.astype(np.float64) / (1 << 31) - 1.0
    return [_rounded(float(x)) for x in (np.sqrt(flat @ flat), flat.sum(), flat @ row)]


def _rounded(value):
    return float(f"{value:.7g}")


def differences(found, golden, loss=LOSS, weights=WEIGHTS):
    """Returns a sentence for every figure that differs by more than the tolerances."""
    told = [
        f"{name}: {_short(found[name])}, golden {_short(golden[name])}"
        for name in EXACT
        if _plain(found[name]) != golden[name]
    ]
    for name in ("losses", "evaluations"):
        for place, (one, other) in enumerate(zip(found[name], golden[name], strict=False)):
            if not math.isclose(one, other, rel_tol=loss):
                told.append(f"{name}[{place}]: {one}, golden {other}")
                break
    told += _of_weights("initial", found["initial"], golden["initial"], DRAWN)
    for name in ("trained", "kept"):
        told += _of_weights(name, found[name], golden[name], weights)
    return told


def _of_weights(what, found, golden, tolerance):
    if found.keys() != golden.keys():
        return [f"{what}: has {sorted(found)}, golden {sorted(golden)}"]
    return [
        f"{what} {name}: {found[name]}, golden {golden[name]}"
        for name in golden
        if distance(found[name], golden[name]) > tolerance
    ]


def distance(one, other):
    """Returns how far apart two fingerprints are, over the norm."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) / max(other[0], 1e-9)


def _plain(value):
    return json.loads(json.dumps(value))


def _short(value):
    text = json.dumps(value)
    return (
        text
        if len(text) < 300
        else f"{text[:300]}… ({hashlib.sha256(text.encode()).hexdigest()[:8]})"
    )


def machine():
    """Returns what the inexact figures depend on beyond rounding: torch draws by them."""
    return {"torch": ".".join(torch.__version__.split(".")[:2]), "machine": platform.machine()}


def read(path):
    """Returns stored figures."""
    return json.loads(path.read_text(encoding="utf-8"))


def write(path, about, kinds):
    """Writes figures, a line each, so that a change of one is a change of one line."""
    lines = ["{", f' "about": {json.dumps(about)},', ' "kinds": {']
    for last, (kind, figures) in zip(_is_last(kinds), kinds.items(), strict=True):
        lines.append(f"  {json.dumps(kind)}: {{")
        for end, (name, value) in zip(_is_last(figures), figures.items(), strict=True):
            compact = json.dumps(value, separators=(",", ":"))
            lines.append(f"   {json.dumps(name)}: {compact}{'' if end else ','}")
        lines.append("  }" if last else "  },")
    path.write_text("\n".join([*lines, " }", "}", ""]), encoding="utf-8")


def _is_last(values):
    yield from (number == len(values) for number in range(1, len(values) + 1))
