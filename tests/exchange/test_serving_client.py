"""examples/serving_client.py, against a server that answers as TensorFlow Serving's REST API says.

https://www.tensorflow.org/tfx/serving/api_rest: GET /v1/models/NAME/metadata, POST NAME:predict
with "inputs" in columns and "outputs" in the answer, errors as {"error": …}. No TensorFlow Serving
runs here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import fastlstm
from fastlstm.text.files import load_language_model

CLIENT = Path(__file__).parents[2] / "examples" / "serving_client.py"


class Stub(BaseHTTPRequestHandler):
    """One text model, under /v1/models/book."""

    model: Any
    is_step: bool

    def do_GET(self):
        if self.path != "/v1/models/book/metadata":
            return self._answer(404, {"error": f"Malformed request: GET {self.path}"})
        config = self.model.config
        state = [config.num_layers, -1, config.rnn_size]
        shapes = {"tokens": [-1] if self.is_step else [-1, -1], "h": state, "c": state}
        inputs = {
            name: {
                "dtype": "DT_INT32" if name == "tokens" else "DT_FLOAT",
                "tensor_shape": {
                    "dim": [{"size": str(size), "name": ""} for size in shape],
                    "unknown_rank": False,
                },
                "name": f"serving_default_{name}:0",
            }
            for name, shape in shapes.items()
        }
        signatures = {"serving_default": {"inputs": inputs, "outputs": {}}}
        metadata = {"signature_def": {"signature_def": signatures}}
        return self._answer(200, {"model_spec": {"name": "book"}, "metadata": metadata})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/models/book:predict" or set(body["inputs"]) != {"tokens", "h", "c"}:
            return self._answer(400, {"error": f"Malformed request: POST {self.path}"})
        tokens = torch.tensor(body["inputs"]["tokens"])
        assert tokens.dim() == (1 if self.is_step else 2)
        state = tuple(torch.tensor(body["inputs"][name]) for name in "hc")
        with torch.no_grad():
            logits, (h, c) = self.model(tokens[None] if self.is_step else tokens, state)
        logits = logits[0] if self.is_step else logits
        outputs = {"logits": logits, "h_out": h, "c_out": c}
        return self._answer(200, {"outputs": {k: v.tolist() for k, v in outputs.items()}})

    def _answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


@contextmanager
def served(run, is_step):
    model = load_language_model(run).model
    handler = type("Handler", (Stub,), {"model": model, "is_step": is_step})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/models"
        server.shutdown()
        thread.join()


def client(*arguments):
    command = [sys.executable, "-S", str(CLIENT), *arguments]  # -S: the standard library alone
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("is_step", [False, True])
def test_the_likeliest_text_is_that_of_the_run(is_step, text_run):
    run = text_run(num_layers=2)
    with served(run, is_step) as models:
        done = client(f"{models}/book", str(run), "the quick", "30", "0")
    assert done.returncode == 0, done.stderr
    expected = fastlstm.LM.load(run).generate("the quick", 30, temperature=0)
    assert done.stdout.removesuffix("\n") == f"the quick{expected}"


def test_errors_are_one_line(text_run):
    run = text_run()
    with served(run, False) as models:
        done = client(f"{models}/other", str(run), "the")
        assert "404" in done.stderr
        assert "Malformed request" in done.stderr
        assert client(f"{models}/book", str(run), "Zoé").stderr == (
            "the model does not know ['Z', 'é']\n"
        )
        written = client(f"{models}/book", str(run), "the ", "20")
        assert len(written.stdout) == len("the ") + 20 + 1
    done = client(f"{models}/book", str(run), "the")  # the server is gone
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "does not answer" in done.stderr
