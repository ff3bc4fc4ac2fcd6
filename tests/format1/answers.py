"""What the stored runs are asked: the same questions when the set was made and in every test.

Every function takes the folder of the set, or a copy of it that may be written to, and returns
plain values.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import csv

import fastlstm
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.train import train_forecaster
from fastlstm.text.data.text import prepare_text
from fastlstm.text.loading import load_decoder
from fastlstm.text.sampling import Sampling
from fastlstm.text.writing import prompt_ids
from golden.figures import fingerprint, without_bf16
from golden.recording import recorded

SET = Path(__file__).with_name("stored")
KEY = b"a key that signs states"
PROMPTS = ("", "the qu", "naïve")
LENGTH = 40
TEXT_MODELS = (
    "char", "byte", "bpe", "text-stopped", "text-stopped/checkpoint-5"
)  # fmt: skip
STOPPED = ("text-stopped", "windows-stopped", "streams-stopped")
FORECASTERS = ("windows", "streams", "counts")


# text -------------------------------------------------------------------------------------------


def text_model(folder: Path, name: str) -> dict[str, Any]:
    """Returns what a text model writes, which probabilities it gives, how well it predicts."""
    lm = fastlstm.LM.load(folder / name)
    ids = lm.tokenizer.encode("the quick ")
    with torch.no_grad():
        logits, _ = lm.model(torch.from_numpy(ids.astype(np.int64))[:, None])
    result = lm.evaluate((folder / "text.txt").read_text(encoding="utf-8"))
    return {
        "parameters": sum(p.numel() for p in lm.model.parameters()),
        "vocabulary": lm.tokenizer.kind,
        "ids": ids.tolist(),
        "written": [lm.generate(prompt, LENGTH, temperature=0.0) for prompt in PROMPTS],
        "log probabilities": logits[-1, 0].log_softmax(-1)[:24].tolist(),
        "nats": result.nats_per_token,
        "bits per character": result.bits_per_char,
        "bits per byte": result.bits_per_byte,
        "tokens": result.num_tokens,
    }


def session(folder: Path, blob: str, key: bytes | None) -> str:
    """Returns how a stored session goes on."""
    found = fastlstm.LM.load(folder / "char").session()
    return found.restore(base64.b64decode(blob), key).write(LENGTH, temperature=0.0)


def served(folder: Path, body: dict[str, Any]) -> dict[str, Any]:
    """Returns what a server of the char model answers: the text and the state behind it."""
    from running_server import SETTINGS, Running

    server = Running(load_decoder(folder / "char"), SETTINGS, session_key=KEY)
    try:
        answer = server.post(max_tokens=LENGTH, temperature=0.0, return_session=True, **body)
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice
    finally:
        server.end()


def smallest_margin(folder: Path, name: str) -> float:
    """Returns how far the likeliest token was above the next, where that was the least.

    Where it is not small, the text that is written does not hang on rounding.
    """
    lm, margins = fastlstm.LM.load(folder / name), []
    for prompt in PROMPTS:
        stream = lm.decoder.stream()
        stream.set(Sampling(temperature=0.0), num_top=2)
        stream.feed(prompt_ids(lm.tokenizer, prompt))
        stream.begin(LENGTH)
        while stream.is_running:
            lm.decoder.run([stream], LENGTH)
        top = stream.take_scores()[2]
        margins += [best - next_one for best, next_one in zip(top[::2], top[1::2], strict=True)]
    return min(margins)


def cached_text(folder: Path) -> dict[str, Any]:
    """Returns what a text is prepared to where the cache holds it already.

    Whether the entry is used is not asked: a new format may pass over it, but never misread it.
    """
    data = prepare_text(folder / "text.txt", cache_dir=folder / "cache")
    return {
        "ids": hashlib.sha256(np.asarray(data.ids, np.int64).tobytes()).hexdigest(),
        "tokens": len(data.ids),
        "characters": "".join(piece.decode() for piece in data.tokenizer.pieces),
        "counts": data.train_counts().tolist(),
    }


# tables -----------------------------------------------------------------------------------------


def table(folder: Path, name: str) -> pa.Table:
    """Returns one of the tables as a frame: a checkpoint knows a file by its place and times."""
    return csv.read_csv(folder / f"{name}.csv")


def forecaster(folder: Path, name: str) -> dict[str, Any]:
    """Returns forecasts, quantiles and errors of a stored forecaster."""
    model = fastlstm.Forecaster.load(folder / name)
    whole, horizon = table(folder, "table"), model.horizon
    series = whole["unique_id"].to_pylist()
    behind = [series[row:].count(series[row]) for row in range(len(series))]
    past = whole.filter([number > horizon for number in behind])
    future = None
    if columns := model.get_params()["future"]:
        ahead = whole.filter([number <= horizon for number in behind])
        future = ahead.select(["unique_id", "ds", *columns])
    levels = (0.1, 0.5, 0.9)
    errors = model.backtest(frame=whole, part="test", quantiles=levels)
    errors.pop("ridge", None)  # younger than the set
    return {
        "parameters": sum(p.numel() for p in model.network_.parameters()),
        "forecast": _columns(model.predict(past, future=future)),
        "quantiles": _columns(model.predict_quantiles(past, levels, future=future)),
        "errors": errors,
    }


def _columns(found: pa.Table) -> dict[str, list[Any]]:
    return {
        name: [v if isinstance(v, float) else str(v) for v in found[name].to_pylist()]
        for name in found.column_names
    }


# runs that were stopped -------------------------------------------------------------------------


def resumed(folder: Path, name: str) -> dict[str, Any]:
    """Resumes a stopped run to its end and returns what it did.

    Args:
        folder: a copy; it is written to.
        name: of the run.
    """
    events: list[dict[str, Any]] = []
    with without_bf16(), recorded() as recording:
        if name == "text-stopped":
            fastlstm.train(
                folder / "text.txt", out=folder / name, resume=True, observers=[events.append]
            )
        else:
            train_forecaster(
                table(folder, "one"), ForecastConfig(), out=folder / name, resume=True,
                observers=[events.append],
            )  # fmt: skip
    end = next(event for event in events if event["event"] == "end")
    return {
        "data": recording.data,
        "random": recording.random,
        "rates": recording.rates,
        "steps": end["step"],
        "best step": end["best_step"],
        "losses": recording.losses,
        "evaluations": [[e["step"], e["loss"]] for e in events if e["event"] == "eval"],
        "warnings": [e["text"] for e in events if e.get("level") == "warning"],
        "weights": {n: fingerprint(t) for n, t in recording.trained.items()},
        "kept": _published(folder / name),
    }


def _published(run: Path) -> dict[str, list[float]]:
    from safetensors.torch import load_file

    return {n: fingerprint(t) for n, t in sorted(load_file(run / "model.safetensors").items())}


# comparing --------------------------------------------------------------------------------------


def differences(found: Any, stored: Any, tolerance: float, place: str = "") -> list[str]:
    """Returns a sentence for every value that differs; floats may by the tolerance."""
    if isinstance(stored, dict) and isinstance(found, dict):
        if found.keys() != stored.keys():
            return [f"{place}: has {list(found)}, stored {list(stored)}"]
        parts: list[tuple[Any, Any, Any]] = [(n, found[n], stored[n]) for n in stored]
    elif isinstance(stored, list) and isinstance(found, list | tuple):
        if len(found) != len(stored):
            return [f"{place}: {len(found)} values, stored {len(stored)}"]
        parts = [(n, *both) for n, both in enumerate(zip(found, stored, strict=True))]
    elif isinstance(stored, float) and isinstance(found, int | float):
        is_same = math.isclose(found, stored, rel_tol=tolerance, abs_tol=tolerance)
        return [] if is_same or found == stored else [f"{place}: {found}, stored {stored}"]
    else:
        return [] if found == stored else [f"{place}: {found!r}, stored {stored!r}"]
    return [
        told for n, one, two in parts for told in differences(one, two, tolerance, f"{place}/{n}")
    ]


QUESTIONS: dict[str, Callable[[Path], Any]] = {
    **{f"text model {name}": lambda f, n=name: text_model(f, n) for name in TEXT_MODELS},
    **{f"forecaster {name}": lambda f, n=name: forecaster(f, n) for name in FORECASTERS},
    **{f"resumed {name}": lambda f, n=name: resumed(f, n) for name in STOPPED},
    "cached text": cached_text,
}
