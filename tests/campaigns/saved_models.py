"""Exports a text run and a forecaster as SavedModels and uses them as TensorFlow's own tools do.

usage: python tests/campaigns/saved_models.py RUN FORECASTER

Needs an environment with fastlstm[tensorflow] and tensorflow-serving-api; CI has neither. For each
run: `export` with its own check, `tf.saved_model.load` at several sizes, `saved_model_cli run` on
inputs from a file, and a PredictRequest that is matched to the signature. TensorFlow Serving itself
does not run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2

import fastlstm
from fastlstm.exchange.saved_model_format import SIGNATURE, SavedModelRunner

SIZES = {"T": 6, "B": 2}


def main() -> None:
    for run in sys.argv[1:3]:
        for weights in ("fp32", "int8"):
            with tempfile.TemporaryDirectory() as folder:
                print(json.dumps({"run": run, "weights": weights, **figures(run, weights, folder)}))


def figures(run: str, weights: str, folder: str) -> dict[str, Any]:
    out = Path(folder) / "out"
    report = fastlstm.export(run, to="saved-model", out=out, weights=weights)
    assert report.proof is not None
    rng = np.random.default_rng(0)
    inputs = {}
    for value in report.inputs:
        shape = [SIZES[size] if isinstance(size, str) else size for size in value.shape]
        numbers = rng.integers(0, 5, shape) if value.dtype == "int32" else rng.normal(size=shape)
        inputs[value.name] = numbers.astype(value.dtype)
    expected = SavedModelRunner(out / "1").run(inputs)
    return {
        "max_error": report.proof.max_error,
        "saved_model_cli": command_line(out / "1", inputs, expected, Path(folder)),
        "predict_request": request(out / "1", inputs, expected),
        "bytes": report.num_bytes,
    }


def command_line(model: Path, inputs: Any, expected: Any, folder: Path) -> float:
    """Largest difference of what `saved_model_cli run` writes."""
    for name, array in inputs.items():
        np.save(folder / f"{name}.npy", array)
    given = ";".join(f"{name}={folder}/{name}.npy" for name in inputs)
    tool = Path(sys.executable).with_name("saved_model_cli")
    command = ["run", "--dir", model, "--tag_set", "serve", "--signature_def", SIGNATURE]
    more = ["--inputs", given, "--outdir", folder / "results"]
    subprocess.run([tool, *command, *more], check=True, capture_output=True)
    results = {name: np.load(folder / "results" / f"{name}.npy") for name in expected}
    return max(float(np.nanmax(abs(results[n] - expected[n]))) for n in expected)


def request(model: Path, inputs: Any, expected: Any) -> float:
    """Largest difference of an answer to a request that went through its bytes."""
    sent = predict_pb2.PredictRequest()
    sent.model_spec.name, sent.model_spec.signature_name = "model", SIGNATURE
    for name, array in inputs.items():
        sent.inputs[name].CopyFrom(tf.make_tensor_proto(array))
    got = predict_pb2.PredictRequest.FromString(sent.SerializeToString())
    loaded = tf.saved_model.load(str(model))
    signature = loaded.signatures[got.model_spec.signature_name]
    _, named = signature.structured_input_signature
    assert set(named) == set(got.inputs)
    tensors = {}
    for name, spec in named.items():
        tensor = tf.constant(tf.make_ndarray(got.inputs[name]))
        assert spec.is_compatible_with(tensor), name
        tensors[name] = tensor
    answers = signature(**tensors)
    assert set(answers) == set(expected)
    return max(float(np.nanmax(abs(answers[n].numpy() - expected[n]))) for n in expected)


if __name__ == "__main__":
    main()
