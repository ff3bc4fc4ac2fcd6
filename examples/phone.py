# %% [markdown]
# A text model on a phone: LiteRT runs one step per token; h and c are carried by the caller.
#
#     fastlstm export RUN --to litert --out EXPORT
#     python examples/phone.py EXPORT "ROMEO:" 400      # needs ai_edge_litert and numpy only
#
# In Kotlin, Swift or C++ the loop is the same: the model's signature is `serving_default`, with
# tokens (B) int32, h and c (L, B, H) float32 -> logits (B, V), h_out and c_out.

# %% The directory that `fastlstm export` wrote: model.tflite and tokenizer.json.
import json
import sys
import time
from pathlib import Path

import numpy as np
from ai_edge_litert.interpreter import Interpreter

directory = Path(sys.argv[1])
prompt = sys.argv[2] if len(sys.argv) > 2 else "\n"
length = int(sys.argv[3]) if len(sys.argv) > 3 else 400
temperature = float(sys.argv[4]) if len(sys.argv) > 4 else 0.7

interpreter = Interpreter(str(directory / "model.tflite"), num_threads=1)
step = interpreter.get_signature_runner("serving_default")
tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))

# %% Texts to tokens and back: a token is a character, or a byte of the text in UTF-8.
if tokenizer["kind"] == "char":
    pieces = [char.encode() for char in tokenizer["chars"]]
    units = [char.encode() for char in prompt]
elif tokenizer["kind"] == "byte":
    pieces = [bytes([byte]) for byte in range(256)]
    units = [bytes([byte]) for byte in prompt.encode()]
else:
    sys.exit("a BPE vocabulary needs its own library: tokenizers reads hf_tokenizer.json")
ids = {piece: token for token, piece in enumerate(pieces)}
unknown = [unit.decode() for unit in units if unit not in ids]
if unknown or not units:
    sys.exit(f"the model does not know {unknown[:5]}" if unknown else "the prompt is empty")

# %% The state before the first token is zero; a batch of one.
shape = step.get_input_details()["h"]["shape"]
h = c = np.zeros(shape, np.float32)


def next_logits(token):
    global h, c
    outputs = step(tokens=np.array([token], np.int32), h=h, c=c)
    h, c = outputs["h_out"], outputs["c_out"]
    return outputs["logits"][0]


# %% The prompt is read token by token, then each drawn token is the next input.
for unit in units:
    logits = next_logits(ids[unit])
written = b""
rng = np.random.default_rng(0)
started = time.perf_counter()
for _ in range(length):
    if temperature > 0:
        weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
        token = rng.choice(len(weights), p=weights / weights.sum())
    else:
        token = int(logits.argmax())
    written += pieces[token]
    logits = next_logits(token)
taken = time.perf_counter() - started
print(prompt + written.decode("utf-8", "replace"))
print(f"{length / taken:,.0f} tokens/s on one thread", file=sys.stderr)
