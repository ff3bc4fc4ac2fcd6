"""A small published run of an untrained text model, and decoders with planted faults."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from fastlstm.runs.run_directory import RunDirectory
from fastlstm.text.config import ModelConfig
from fastlstm.text.data.tokenizer import CharTokenizer
from fastlstm.text.decoder import Decoder
from fastlstm.text.files import save_language_model
from fastlstm.text.model import LanguageModel

TOKENIZER = CharTokenizer("".join(sorted("abcdefghijklmnopqrstuvwxyz .\n")))


def publish(path: Path, seed: int = 0, source: str = "", **sizes: Any) -> Path:
    """Publishes a run whose text is `source`; returns its directory."""
    torch.manual_seed(seed)
    model = LanguageModel(ModelConfig(vocab_size=29, embed_size=8, rnn_size=16, **sizes))
    run = RunDirectory(path)
    run.create()
    files = save_language_model(
        model, TOKENIZER, train={"split": "80/15/5"}, data={"source": source} if source else None
    )
    run.publish(files)
    return run.path


class SlowDecoder:
    """A decoder with work around its every call."""

    def __init__(self, decoder: Decoder, seconds: float) -> None:
        self._decoder, self._seconds = decoder, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def run(self, streams: Any, steps: int, threads: int | None = None) -> float:
        time.sleep(self._seconds)
        return self._decoder.run(streams, steps, threads)
