"""A text model to export: its graph, its network, scores in both runtimes."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from fastlstm.errors import DataError, counted
from fastlstm.exchange.graph import Graph, GraphBuilder, lstm_weights
from fastlstm.exchange.source import SHAPES, Arrays, ExportSource, largest_error
from fastlstm.ops.cell_options import CellOptions
from fastlstm.runs.weight_formats import as_floats, in_format
from fastlstm.system.measurements import calls_per_s
from fastlstm.text.config import ModelConfig
from fastlstm.text.data.tokenizer import BpeTokenizer
from fastlstm.text.decoder import Decoder, native_refusal
from fastlstm.text.evaluation import PRIME, num_lanes
from fastlstm.text.files import build_model
from fastlstm.text.held_out import read_text, validation_ids
from fastlstm.text.model import LanguageModel
from fastlstm.text.stored_model import TOKENIZER_FILE, StoredModel
from fastlstm.text.weight_report import writing_speed

TEXT_GRAPH = "fastlstm_text"
NORM_EPSILON = 1e-5
"""Of torch.nn.LayerNorm."""


def text_graph(weights: Mapping[str, Any], config: ModelConfig, *, is_step: bool) -> Graph:
    """Returns the graph of a text model.

    Inputs are `tokens` `(T, B)` int32, `h` and `c` `(L, B, H)`; outputs `logits` `(T, B, V)`,
    `h_out` and `c_out`. With `is_step`, one token per call, `tokens` are `(B,)` and `logits`
    `(B, V)`. Weights have the names of `LanguageModel`; matrices may be `QuantizedMatrix`.
    """
    L, H, V = config.num_layers, config.rnn_size, config.vocab_size
    g = GraphBuilder(TEXT_GRAPH, dict(weights))
    tokens = g.input("tokens", ("B",) if is_step else ("T", "B"), "int32")
    h, c = g.input("h", (L, "B", H)), g.input("c", (L, "B", H))
    x = g.gather("embedding.weight", tokens)
    if is_step:
        x = g.reshape(x, (1, "B", config.embed_size))
    hs, cs = [], []
    for k in range(L):
        state = g.slice(h, 0, k, k + 1), g.slice(c, 0, k, k + 1)
        y, h_k, c_k = g.lstm(x, *state, lstm_weights(f"layers.{k}.", 0), CellOptions.of(config))
        if config.output_norm:
            y = g.layer_norm(y, f"norms.{k}.weight", f"norms.{k}.bias", NORM_EPSILON)
        x = x + y if config.residual and x.shape == y.shape else y
        hs.append(h_k)
        cs.append(c_k)
    if config.output_rank:
        x = g.linear(x, "projection.weight")
    output = "embedding.weight" if config.tie_weights else "output.weight"
    logits = g.linear(x, output, "output.bias")
    g.output("logits", g.reshape(logits, ("B", V)) if is_step else logits)
    g.output("h_out", g.concat(hs, 0))
    g.output("c_out", g.concat(cs, 0))
    return g.graph


_LANES, _MAX_TOKENS, _SPEED_S = 16, 10_000, 0.3
_MAX_LOGITS = 1 << 25
"""Logits in memory at once, 128 MB."""
_OWN_ERROR = 2.5e-6
"""Allowed error of fastlstm's float32: a quarter of the smallest limit."""


class TextExport(ExportSource):
    """A text model; `check_text` is the text for the comparison, by default the validation part."""

    kind = "text"

    def __init__(self, stored: StoredModel, weight_format: str, check_text: Any = None) -> None:
        super().__init__(weight_format, stored.weight_format)
        self.notes[:0] = [stored.note] if stored.note else []
        self._stored, self._text = stored, check_text
        self._weights = in_format(stored.weights, weight_format)
        self._model = build_model(as_floats(self._weights), stored.model_config).eval()

    def graph(self) -> Graph:
        graph = text_graph(self._weights, self._stored.model_config, is_step=self.is_step)
        graph.metadata["tokenizer.json"] = self._stored.tokenizer.to_json().decode()
        return graph

    def in_fp32(self) -> TextExport:
        return TextExport(self._stored, "fp32")

    def files(self) -> dict[str, bytes]:
        tokenizer = self._stored.tokenizer
        files = {TOKENIZER_FILE: tokenizer.to_json()}
        if isinstance(tokenizer, BpeTokenizer):
            files["hf_tokenizer.json"] = tokenizer.hugging_face_json()
        return files

    def cases(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Yields random tokens and states.

        In a cell that does not contract, rounding grows from step to step until two correct
        runtimes disagree. The steps of such a model are split into parts, each from fastlstm's
        state.
        """
        rng = np.random.default_rng(0)
        config = self._stored.model_config
        shapes = (*SHAPES, (1, 5), (33, 1))
        for T, lanes in [(1, B) for _, B in shapes] if self.is_step else shapes:
            B = max(1, min(lanes, _MAX_LOGITS // (T * config.vocab_size)))
            tokens = rng.integers(0, config.vocab_size, (T, B), dtype=np.int32)
            shape = (config.num_layers, B, config.rnn_size)
            h = rng.uniform(-1, 1, shape).astype(np.float32)
            c = rng.normal(size=shape).astype(np.float32)
            if not self.has_state:
                h, c = np.zeros_like(h), np.zeros_like(c)
            if self.is_step:
                yield {"tokens": tokens[0], "h": h, "c": c}
            else:
                yield from self._parts({"tokens": tokens, "h": h, "c": c})

    def _parts(self, inputs: dict[str, NDArray[Any]]) -> Iterator[dict[str, Any]]:
        """Yields the steps in parts in which rounding stays small, each from fastlstm's state; only
        the first part if the file takes no state."""
        tokens = inputs["tokens"]
        num = self._num_comparable(inputs)
        yield {**inputs, "tokens": tokens[:num]}
        if num < len(tokens):
            parts = "its steps in parts, each from fastlstm's state"
            parts = parts if self.has_state else "first steps only"
            note = f"rounding grows from step to step of this model; compared {parts}"
            self.notes += [note] if note not in self.notes else []
        while self.has_state and num < len(tokens):
            state = self.run({**inputs, "tokens": tokens[:num]})
            tokens = tokens[num:]
            inputs = {"tokens": tokens[:num], "h": state["h_out"], "c": state["c_out"]}
            num = self._num_comparable(inputs)
            yield {**inputs, "tokens": tokens[:num]}

    def _num_comparable(self, inputs: dict[str, NDArray[Any]]) -> int:
        """Returns for how many steps float32 stays about as close to float64 as after one step."""
        num = len(inputs["tokens"])
        limit = max(_OWN_ERROR, 2 * self._own_error(inputs, 1)) if num > 1 else 0.0
        while num > 1 and not self._own_error(inputs, num) <= limit:  # which may be NaN
            num //= 2
        return num

    def _own_error(self, inputs: dict[str, NDArray[Any]], num: int) -> float:
        given = {**inputs, "tokens": inputs["tokens"][:num]}
        models = self._in_float64, self._model
        return largest_error(*(self.in_units(self._run(model, given)) for model in models))

    @cached_property
    def _in_float64(self) -> LanguageModel:
        return copy.deepcopy(self._model).double()

    def run(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        return self._run(self._model, inputs)

    @torch.no_grad()
    def _run(self, model: LanguageModel, inputs: Arrays) -> dict[str, NDArray[Any]]:
        tokens = torch.from_numpy(np.atleast_2d(inputs["tokens"]).astype(np.int64))
        dtype = model.output.bias.dtype
        state = tuple(torch.from_numpy(inputs[name]).to(dtype) for name in "hc")
        logits, (h, c) = model(tokens, state)
        is_step = inputs["tokens"].ndim == 1
        outputs = {"logits": logits[0] if is_step else logits, "h_out": h, "c_out": c}
        return {name: value.numpy() for name, value in outputs.items()}

    def in_units(self, outputs: Arrays) -> Arrays:
        """Returns logits relative to the largest logit that LSTM outputs in [-1, 1] can give.

        The rounding of the state moves a logit in proportion to the weights of the logit.
        """
        return {**outputs, "logits": outputs["logits"] / self._largest_logit}

    @cached_property
    def _largest_logit(self) -> float:
        sums = self._model.output_weight.detach().abs().sum(1)
        return max(1.0, float(sums.max()))

    def figures(self, runner: Any) -> dict[str, Any]:
        """Returns scores of the first tokens of a text, and the speed of one stream.

        Bits per character are measured for the run's weights, for fastlstm with the weights of
        the file, and for the target.
        """
        speeds = {"target": self._speed(runner)} if self.has_state else {}
        if not self.has_state:
            self.notes.append("every call starts from the zero state")
        elif (why := native_refusal(self._stored.model_config)) is None:
            decoding = "int8" if self.weight_format == "int8" else "fp32"
            decoder = Decoder(self._weights, self._stored.model_config, decoding)
            speeds["fastlstm"] = writing_speed(decoder, threads=1)
        else:
            self.notes.append(f"{why}: fastlstm writes its text on torch")
        figures: dict[str, Any] = {"tokens_per_s": speeds} if speeds else {}
        try:
            ids = self._ids()
        except (DataError, OSError) as error:
            if self._text is not None:
                raise
            self.notes.append(
                f"not compared on text: the run's text cannot be read ({error});"
                " `check_text` gives another"
            )
            return figures
        tokens, is_scored = _lanes(ids)
        targets = tokens[1:]
        chars = float(self._stored.tokenizer.token_chars[targets[is_scored]].sum())
        bits = math.log(2) * max(chars, 1.0)
        here, there = self._logits(self, ids, False), self._logits(runner, ids, self.is_step)
        own = self.unrounded()
        before = here if own is None else self._logits(own, ids, False)
        figures["text"] = {
            "num_tokens": int(is_scored.sum()),
            "agreement": float((here.argmax(-1) == there.argmax(-1)).mean()),
            "bits_per_char": {
                name: _nats(logits[is_scored], targets[is_scored]) / bits
                for name, logits in (("run", before), ("fastlstm", here), ("target", there))
            },
            "rms_logit_error": float(np.sqrt(np.mean((here - there) ** 2))),
        }
        return figures

    def _ids(self) -> NDArray[Any]:
        config, tokenizer = self._stored.config, self._stored.tokenizer
        if self._text is not None:
            text = read_text(config, tokenizer, self._text, "count")
            if text.num_unknown:
                self.notes.append(
                    f"{text.source}: left out {text.num_unknown:,} of"
                    f" {counted(text.num_chars, 'character')}, which the vocabulary does not hold"
                )
            ids = text.ids
        else:
            ids = validation_ids(config, tokenizer)
        if len(ids) < 2:
            raise DataError(f"the text has {len(ids)} tokens, expected at least 2")
        num = min(_MAX_TOKENS, max(2, _MAX_LOGITS // self._stored.model_config.vocab_size))
        return np.asarray(ids[:num])

    def _logits(self, runner: Any, ids: NDArray[Any], is_step: bool) -> NDArray[np.float32]:
        """Returns the logits `(T, B, V)` after each token of the lanes but the last."""
        tokens = _lanes(ids)[0][:-1].astype(np.int32)
        config = self._stored.model_config
        h = c = np.zeros((config.num_layers, tokens.shape[1], config.rnn_size), np.float32)
        if not is_step:
            return np.asarray(runner.run({"tokens": tokens, "h": h, "c": c})["logits"])
        steps = []
        for row in tokens:
            outputs = runner.run({"tokens": row, "h": h, "c": c})
            h, c = outputs["h_out"], outputs["c_out"]
            steps.append(outputs["logits"])
        return np.stack(steps)

    def _speed(self, runner: Any) -> float:
        """Returns tokens per second of one stream, one token per call."""
        config = self._stored.model_config
        h = c = np.zeros((config.num_layers, 1, config.rnn_size), np.float32)
        token = np.zeros(1 if self.is_step else (1, 1), np.int32)
        inputs = {"tokens": token, "h": h, "c": c}

        def write() -> None:
            outputs = runner.run(inputs)
            inputs.update(h=outputs["h_out"], c=outputs["c_out"])
            inputs["tokens"] = outputs["logits"].argmax(-1).astype(np.int32)

        return calls_per_s(write, _SPEED_S)


def _lanes(ids: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Returns tokens as `(1 + T, B)`, each column a part of the text, and a mask of scored steps.

    Except in the first column, the first steps only prime the state. Leftover tokens are dropped.
    """
    num = num_lanes(len(ids), _LANES)
    prime = PRIME if num > 1 else 0
    step = (len(ids) - 1 - prime) // num
    tokens = [ids[k * step : (k + 1) * step + prime + 1] for k in range(num)]
    rows, columns = np.ogrid[: step + prime, :num]
    return np.ascontiguousarray(np.stack(tokens, 1)), (rows >= prime) | (columns == 0)


def _nats(logits: NDArray[np.float32], targets: NDArray[Any]) -> float:
    values, places = torch.from_numpy(logits).double(), torch.from_numpy(targets.astype(np.int64))
    return float(F.cross_entropy(values, places, reduction="sum"))
