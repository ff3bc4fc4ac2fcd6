# %% [markdown]
# A Keras text model in ONNX Runtime: imported as a run, exported, and a text written with it.
#
#     python examples/keras_to_onnx.py model.keras book.txt OUT      # needs fastlstm[onnx,keras]
#
# book.txt is the text that the model was trained on: a model's file does not hold its characters.

# %% The model becomes a run, which generates, evaluates, trains on, compresses and serves too.
import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime

import fastlstm

model, text, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
imported = fastlstm.import_run(model, out=out / "run", text=text)
print(f"imported: {imported.kind}, made by {imported.made_by}")

# %% The run becomes model.onnx and tokenizer.json, checked in ONNX Runtime before they are there.
report = fastlstm.export(out / "run", to="onnx", out=out / "onnx", check_text=text)
print(f"exported: {report.num_bytes:,} bytes, max error {report.proof.max_error:.1e}")

# %% What an application does with it: one token per call, the state is carried by the caller.
session = onnxruntime.InferenceSession(out / "onnx" / "model.onnx")
chars = json.loads((out / "onnx" / "tokenizer.json").read_text(encoding="utf-8"))["chars"]
layers, _, units = next(i.shape for i in session.get_inputs() if i.name == "h")
h = c = np.zeros((layers, 1, units), np.float32)
token, written, rng = 0, "", np.random.default_rng(0)
for _ in range(200):
    logits, h, c = session.run(None, {"tokens": np.array([[token]], np.int32), "h": h, "c": c})
    shares = np.exp((logits[0, 0] - logits[0, 0].max()) / 0.7)
    token = rng.choice(len(shares), p=shares / shares.sum())
    written += chars[token]
print(written)
