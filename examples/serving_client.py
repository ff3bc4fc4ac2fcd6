# %% [markdown]
# A text model in TensorFlow Serving: this client writes text with it, over REST.
#
#     fastlstm export RUN --to saved-model --out EXPORT
#     tensorflow_model_server --rest_api_port=8501 --model_name=book --model_base_path=$PWD/EXPORT
#     python examples/serving_client.py http://localhost:8501/v1/models/book EXPORT "ROMEO:" 400
#
# The server keeps nothing between requests: h and c come with every answer and go back with the
# next request. Python's standard library is all that is needed.

# %% The address of the model, and the directory that `fastlstm export` wrote.
import json
import math
import random
import sys
import urllib.error
import urllib.request
from pathlib import Path

address, directory = sys.argv[1].rstrip("/"), Path(sys.argv[2])
prompt = sys.argv[3] if len(sys.argv) > 3 else "\n"
length = int(sys.argv[4]) if len(sys.argv) > 4 else 400
temperature = float(sys.argv[5]) if len(sys.argv) > 5 else 0.7
tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
if tokenizer["kind"] != "char":
    sys.exit(f"this example writes characters; the model has a {tokenizer['kind']} vocabulary")
chars = tokenizer["chars"]
unknown = [char for char in prompt if char not in chars]
if unknown or not prompt:
    sys.exit(f"the model does not know {unknown[:5]}" if unknown else "the prompt is empty")


def asked(path="", body=None):
    """Returns the server's answer to a request."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:  # TensorFlow Serving says why, as JSON
        sys.exit(f"{address}: {error.code}, {error.read().decode('utf-8', 'replace')}")
    except (urllib.error.URLError, TimeoutError) as error:
        sys.exit(f"{address} does not answer: {getattr(error, 'reason', error)}")


# %% The signature says how many layers and units there are, and whether a call is one step.
signature = asked("/metadata")["metadata"]["signature_def"]["signature_def"]["serving_default"]
shapes = {
    name: [int(axis["size"]) for axis in value["tensor_shape"]["dim"]]
    for name, value in signature["inputs"].items()
}
layers, _, units = shapes["h"]
is_step = len(shapes["tokens"]) == 1


# %% One request. The column format, "inputs": the batch is not the first axis of tokens, h and c.
def predicted(tokens, h, c):
    """Returns the logits behind the last of the tokens, and the state, of a batch of one."""
    tokens = tokens if is_step else [[token] for token in tokens]  # (B) of a step, else (T, B)
    outputs = asked(":predict", {"inputs": {"tokens": tokens, "h": h, "c": c}})["outputs"]
    return outputs["logits"][-1] if is_step else outputs["logits"][-1][0], outputs


# %% The prompt is one request, or of a step one per token; then each drawn token is the next input.
state = {"h_out": [[[0.0] * units]] * layers, "c_out": [[[0.0] * units]] * layers}
waiting = [chars.index(char) for char in prompt]
print(prompt, end="", flush=True)
for _ in range(length):
    for tokens in [[token] for token in waiting] if is_step else [waiting]:
        logits, state = predicted(tokens, state["h_out"], state["c_out"])
    highest = max(logits)
    weights = [
        math.exp((x - highest) / temperature) if temperature else x == highest for x in logits
    ]
    waiting = random.choices(range(len(chars)), weights)
    print(chars[waiting[0]], end="", flush=True)
print()
