"""Judges a character model trained by Keras with fastlstm's evaluator (carried state and windows).

usage: python benchmarks/keras_peer.py MODEL.keras TEXT [--epoch-log LOG] [--seconds-per-epoch S]
MODEL is Embedding -> LSTM -> Dense over the sorted characters of TEXT (CRLF as LF), as the usual
Keras recipe builds it; LOG holds its "epoch N train_s S train_bpc X valid_bpc Y" lines.
Needs h5py. The result is one JSON line in benchmarks/results/<machine>/keras.jsonl.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import re
import zipfile
from pathlib import Path

import h5py
import numpy as np
import torch
from machine import describe_machine, results_folder

from fastlstm.text.config import ModelConfig
from fastlstm.text.data.text import prepare_text
from fastlstm.text.evaluation import evaluate
from fastlstm.text.model import LanguageModel


def keras_weights(path: Path) -> list[np.ndarray]:
    """Returns embedding, kernel (E, 4H), recurrent kernel (H, 4H), bias, dense (H, V), bias."""
    found: dict[str, np.ndarray] = {}
    with (
        zipfile.ZipFile(path) as archive,
        h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as file,
    ):
        file.visititems(
            lambda name, node: (
                found.update({name: node[()]}) if isinstance(node, h5py.Dataset) else None
            )
        )
    layers = (
        "embedding/vars/0",
        "cell/vars/0",
        "cell/vars/1",
        "cell/vars/2",
        "dense/vars/0",
        "dense/vars/1",
    )
    return [next(v for k, v in found.items() if k.endswith(layer)) for layer in layers]


def build(path: Path) -> LanguageModel:
    """Returns the same model in fastlstm; Keras' gate order i, f, c, o is torch's i, f, g, o."""
    embedding, kernel, recurrent, bias, dense, dense_bias = keras_weights(path)
    V, E = embedding.shape
    model = LanguageModel(ModelConfig(vocab_size=V, embed_size=E, rnn_size=recurrent.shape[0]))
    values = {
        "embedding.weight": embedding,
        "layers.0.weight_ih_l0": kernel.T,
        "layers.0.weight_hh_l0": recurrent.T,
        "layers.0.bias_ih_l0": bias,
        "layers.0.bias_hh_l0": np.zeros_like(bias),
        "output.weight": dense.T,
        "output.bias": dense_bias,
    }
    model.load_state_dict(
        {name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in values.items()}
    )
    return model


def _fastest(epochs: list[tuple[str, ...]]) -> float:
    """Returns the seconds of the fastest epoch; the log counts them up."""
    ends = [0.0, *(float(seconds) for _, seconds, _, _ in epochs)]
    return min((b - a for a, b in itertools.pairwise(ends)), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("text")
    parser.add_argument("--epoch-log", type=Path)
    parser.add_argument("--seconds-per-epoch", type=float, help="of an epoch on a quiet machine")
    options = parser.parse_args()
    text = prepare_text(options.text, vocab="char")
    valid = text.split("90/5/5").valid
    model = build(options.model)
    carried = evaluate(model, valid, text.tokenizer)
    window = evaluate(model, valid, text.tokenizer, zero_state_window=100)
    pattern = re.compile(r"epoch (\d+) train_s (\d+) train_bpc ([\d.]+) valid_bpc ([\d.]+)")
    log = options.epoch_log.read_text() if options.epoch_log else ""
    result = {
        "peer": "keras/tensorflow",
        "machine": describe_machine(),
        "carried_bits_per_char": carried.bits_per_char,
        "window_100_bits_per_char": window.bits_per_char,
        "seconds_per_epoch": options.seconds_per_epoch or _fastest(pattern.findall(log)),
        "epochs": [[int(a), float(b), float(c), float(d)] for a, b, c, d in pattern.findall(log)],
    }
    with (results_folder() / "keras.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
