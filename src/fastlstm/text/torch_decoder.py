"""`TorchDecoder`: writing with models whose cells the native decoder lacks.

Torch computes the logits of one token at a time. The rest is done by native streams on a model of
one unit without weights, whose output bias is set to the logits before every step.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastlstm.errors import ConfigError, counted
from fastlstm.report.terminal import short_bytes
from fastlstm.runs.weight_formats import as_floats, check_format
from fastlstm.system import hardware
from fastlstm.text.config import ModelConfig
from fastlstm.text.decoder import FORMATS, Decoder, Stream, Weight, model_hash, native_refusal
from fastlstm.text.files import build_model
from fastlstm.text.stored_model import parameter_shapes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray


class TorchDecoder(Decoder):
    """A `Decoder` whose model runs on torch, on the CPU in fp32. Slow."""

    def __init__(
        self, weights: Mapping[str, Weight], config: ModelConfig, weight_format: str = "fp32"
    ) -> None:
        check_format(weight_format, FORMATS)
        if weight_format != "fp32":
            raise ConfigError(
                f"weights are {weight_format!r}, but {native_refusal(config)} and torch writes in"
                " fp32 only"
            )
        arrays = as_floats(weights)
        self.model = build_model(arrays, config).eval()
        least = ModelConfig(config.vocab_size, embed_size=1, rnn_size=1)
        shapes = parameter_shapes(least)
        self._chooser = Decoder({n: np.zeros(s, np.float32) for n, s in shapes.items()}, least)
        self.config, self.weight_format = config, weight_format
        self.model_hash = model_hash(weights, config, weight_format)
        self.nbytes = sum(w.nbytes for w in arrays.values())
        self.bytes_per_token = self.nbytes - arrays["embedding.weight"].nbytes

    @property
    def isa(self) -> str:
        return "torch"

    def describe(self, num_streams: int = 1, threads: int | None = None) -> str:
        where = counted(torch.get_num_threads() if threads is None else threads, "thread")
        size = f"{short_bytes(self.nbytes)} of weights"
        return f"torch, fp32 ({where}), {size}: {native_refusal(self.config)}"

    def num_threads(self, num_streams: int) -> int:
        return torch.get_num_threads()

    def stream(self) -> Stream:
        return _TorchStream(self)

    def run(self, streams: Sequence[Stream], steps: int, threads: int | None = None) -> float:
        """Works like `Decoder.run`; torch chooses its own threads."""
        start_s = time.perf_counter()
        for stream in streams:
            assert isinstance(stream, _TorchStream)
            for _ in range(steps):
                if not stream.is_running:
                    break
                self._step(stream)
        return time.perf_counter() - start_s

    def _step(self, stream: _TorchStream) -> None:
        """Has a stream read one token and, if it is due, write one or end."""
        if len(stream.unread) > 1 or stream.native.room > 0:
            with torch.no_grad():
                token = torch.tensor([[stream.unread[0]]])
                features, stream.state = self.model.features(token, stream.state)
                self._chooser.output_bias[:] = self.model.logits(features[0, 0]).numpy()
        before = stream.native.num_waiting
        self._chooser.run([stream], 1, 1)
        new = np.frombuffer(stream.native.take(), np.int32).tolist()
        stream.written += new
        if new:
            stream.unread = new
        else:
            del stream.unread[: before - stream.native.num_waiting]


class _TorchStream(Stream):
    """A stream with `state`, each `(L, 1, H)`, and the `unread` and the `written` tokens."""

    def __init__(self, decoder: TorchDecoder) -> None:
        config = decoder.config
        self.decoder = decoder
        self._record = hardware.native().DecodeStream(config.vocab_size, 1, 1)
        self.state = decoder.model.initial_state(1)
        self.unread: list[int] = []
        self.written: list[int] = []

    def feed(self, tokens: Sequence[int] | NDArray[Any]) -> None:
        super().feed(tokens)
        self.unread += map(int, tokens)

    def take(self) -> NDArray[np.int32]:
        super().take()
        written, self.written = self.written, []
        return np.array(written, np.int32)

    def save(self) -> bytes:
        """Returns the model's state, the tokens to be read, and the native stream."""
        state = torch.cat([*self.state]).numpy().tobytes()
        head = np.array([len(self.unread), *self.unread], np.int32)
        return state + head.tobytes() + super().save()

    def restore(self, blob: bytes) -> None:
        L, H = self.decoder.config.num_layers, self.decoder.config.rnn_size
        size = 2 * L * H * 4
        state = np.frombuffer(blob[:size], np.float32)
        count = int.from_bytes(blob[size : size + 4], "little")
        rest = size + 4 * (1 + count)
        if len(blob) < rest or not np.isfinite(state).all():
            raise ValueError("the state is cut short or not finite")
        unread = np.frombuffer(blob[size + 4 : rest], np.int32).tolist()
        V = self.decoder.config.vocab_size
        native = hardware.native().DecodeStream(V, 1, 1)
        native.restore(blob[rest:])  # a new one: if it is refused, nothing has changed
        if native.num_waiting != count or not all(0 <= token < V for token in unread):
            raise ValueError("the state is inconsistent")
        self.native.restore(blob[rest:])  # its settings stay
        self.unread, self.written = unread, []
        h, c = torch.from_numpy(state.copy()).view(2, L, 1, H)
        self.state = h, c
