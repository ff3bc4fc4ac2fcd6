"""`LM`: a trained model with its tokenizer, for generating and evaluating text."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, get_args

import torch

from fastlstm.errors import ConfigError, DataError, PromptError, counted, kind_of_value
from fastlstm.ops.packed_weights import Contents
from fastlstm.report.html import InNotebook
from fastlstm.runs.weight_formats import check_format
from fastlstm.system.fields import Device
from fastlstm.system.hardware import check_device
from fastlstm.text.config import ModelConfig
from fastlstm.text.data.text import TextDataset, UnknownPolicy
from fastlstm.text.data.tokenizer import CharTokenizer, KnownCharacters, shown_characters
from fastlstm.text.decoder import FORMATS, Decoder, default_format, float_weights, format_note
from fastlstm.text.evaluation import Evaluation, evaluate_on, with_unknown
from fastlstm.text.files import language_model_rows, load_language_model
from fastlstm.text.held_out import read_text
from fastlstm.text.loading import device_for, gpu_decoder
from fastlstm.text.sampling import (
    MAX_SEED,
    Sampling,
    check_max_tokens,
    known_settings,
    sampling_of,
)
from fastlstm.text.session import Session
from fastlstm.text.stored_model import format_of
from fastlstm.text.writing import Pieces, Text, begin, write_all

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fastlstm.runs.weight_formats import QuantizedMatrix
    from fastlstm.text.data.tokenizer import Tokenizer
    from fastlstm.text.model import LanguageModel


class LM(InNotebook):
    """A trained language model.

    Example:
        ```python
        lm = LM.load("runs/book")
        print(lm.generate("Well, Prince", max_tokens=500, temperature=0.8))
        ```

    Attributes:
        model: the network, in evaluation mode.
        tokenizer: its vocabulary.
        config: the run's config.json: `model`, `train`, ….
        generation: the run's sampling defaults, generation_config.json.
        note: what to tell the user about the choice of weights, or None.
        weights: format of the weights for writing: "fp32", "bf16", "int8" or "int4"; can be set.
        stored: the matrices of an int8 or int4 run as its file holds them.
        device: where text is written and scored: "cpu", "cuda", or "auto", which decides by the
            number of texts. A GPU writes in fp16 unless fp32 or bf16 was asked for.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        config: dict[str, Any] | None = None,
        generation: dict[str, Any] | None = None,
        note: str | None = None,
        weights: str | None = None,
        stored: Mapping[str, QuantizedMatrix] | None = None,
        device: Device = "auto",
    ) -> None:
        if not isinstance(getattr(model, "config", None), ModelConfig):
            raise ConfigError(
                f"the model is {kind_of_value(model)}, expected a LanguageModel; LM.load(path)"
                " opens a run"
            )
        self.config = {} if config is None else config
        check_device(device)
        self._default = default_format(self.stored_format, model.config)
        self._is_given = weights is not None
        weights = weights or self._default
        check_format(weights, FORMATS)
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.generation = known_settings(generation or {})
        self.note = note
        self.weights = weights
        self.stored, self.device = stored or {}, device
        self._decoders = dict[tuple[str, str], tuple[Decoder, Contents]]()

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, weights: str | None = None, device: Device = "auto"
    ) -> LM:
        """Loads a run directory, one of its checkpoints, or what `train()` returned.

        Args:
            path: the directory.
            weights: format to write text in; default is the run's own format (fp32 if it stores
                fp16), or fp16 on a GPU.
            device: where to write and score text: "cpu", "cuda" (an NVIDIA GPU), or "auto": a GPU
                for 64 or more texts at a time.

        Raises:
            ConfigError: an unknown format, or there is no such device.
            RunDirectoryError: there is no run at `path`.
            CorruptFileError: a file does not match its recorded hash; the message names the file.
            FormatError: written by a newer format, or with another tokenizer.
        """
        check_device(device)
        loaded = load_language_model(path)
        about = loaded.config, loaded.generation, loaded.note
        return cls(loaded.model, loaded.tokenizer, *about, weights, loaded.matrices, device)

    @property
    def stored_format(self) -> str:
        """Format of the weights in the run's file: "fp32", "fp16", "int8" or "int4"."""
        return format_of(self.config)

    @property
    def format_note(self) -> str | None:
        """What to tell the user if `weights` is not the format of the file, or None."""
        return format_note(self.stored_format, self.weights)

    @property
    def decoder(self) -> Decoder:
        """The decoder of one text, see `decoder_for`."""
        return self.decoder_for(1)

    def decoder_for(self, num_streams: int) -> Decoder:
        """Returns the decoder that writes `num_streams` texts at a time.

        The decoder holds a copy of the model's weights, in the format `weights` and on `device`.
        The copy is made on first use, and again after a write to the model's weights.
        """
        asked = self.weights if self._is_given or self.weights != self._default else None
        where = device_for(self.device, self.model.config, asked, num_streams)
        key, threads = (where, self.weights), torch.get_num_threads()
        parameters = list(self.model.parameters())
        if key in self._decoders:
            decoder, contents = self._decoders[key]
            if contents.is_still(parameters, threads):
                return decoder
        contents = Contents.of(parameters, threads)  # read first: see ops/packed_weights.py
        made, is_required = None, self.device == "cuda"
        if where == "cuda":
            floats = float_weights(self.model)
            made = gpu_decoder(floats, self.model.config, asked, is_required=is_required)
        decoder = made or Decoder.of(self.model, self.weights, self.stored)
        self._decoders[key] = decoder, contents
        return decoder

    def generate(self, prompt: str = "", max_tokens: int = 500, **settings: Any) -> str:
        """Returns text that continues `prompt` (which is not repeated).

        A model with layer norm, zoneout, relu or linear in its cells writes on torch, at about a
        tenth of the speed or less (docs/howto/cell-option.md).

        Args:
            prompt: text to continue; empty starts a new line.
            max_tokens: tokens to write: characters, with a char vocabulary.
            **settings: how to choose, the fields of `Sampling`: temperature, top_k, top_p, min_p,
                repetition_penalty, frequency_penalty, presence_penalty, logit_bias, stop, seed. A
                setting left out comes from the run (generation_config.json), else from `Sampling`.

        Raises:
            PromptError: an unseen character in `prompt`, or a setting out of range.
            NonFiniteError: the model's weights are damaged.
        """
        return "".join(self.stream(prompt, max_tokens, **settings))

    def stream(self, prompt: str = "", max_tokens: int = 500, **settings: Any) -> Pieces:
        """Works like `generate`, but yields pieces as they are made; never splits a character.

        The arguments are checked now, not at the first piece.
        """
        decoder = self.decoder
        return Pieces(decoder, self._begin(decoder, [prompt], max_tokens, settings))

    def generate_batch(
        self, prompts: Sequence[str], max_tokens: int = 500, **settings: Any
    ) -> list[str]:
        """Works like `generate` for many `prompts` at once, far faster than one after the other.

        Each text is what `generate` returns for its prompt and seed. Prompt number k has the seed
        `seed + k`, so that equal prompts give different texts.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Iterable):
            raise PromptError(f"prompts is {kind_of_value(prompts)}, expected a list of texts")
        prompts = list(prompts)
        pieces: list[list[str]] = [[] for _ in prompts]
        decoder = self.decoder_for(len(prompts))
        for ready in write_all(decoder, self._begin(decoder, prompts, max_tokens, settings)):
            for text, piece in zip(pieces, ready, strict=True):
                text.append(piece)
        return ["".join(text) for text in pieces]

    def session(self) -> Session:
        """Returns a text that is read and written in turns, and can be saved and forked."""
        return Session(self.decoder, self.tokenizer, self.generation)

    def _begin(
        self, decoder: Decoder, prompts: Sequence[str], max_tokens: int, settings: dict[str, Any]
    ) -> list[Text]:
        sampling = sampling_of(self.generation, settings)
        check_max_tokens(max_tokens)
        texts = []
        for k, prompt in enumerate(prompts):
            if k > 0 and sampling.seed is not None:
                sampling = replace(sampling, seed=(sampling.seed + 1) % (MAX_SEED + 1))
            texts.append(begin(decoder, self.tokenizer, prompt, max_tokens, sampling))
        return texts if max_tokens > 0 else []

    def evaluate(
        self, text: str | os.PathLike[str], unknown: UnknownPolicy = "count", **settings: Any
    ) -> Evaluation:
        """Scores a text.

        Args:
            text: the text itself, or a `pathlib.Path` of a file, directory or archive of texts.
            unknown: ``count`` leaves out characters that the vocabulary lacks, with a warning, and
                counts them in the result (`text.evaluation.with_unknown`); ``refuse`` raises.
            **settings: settings of `text.evaluation.evaluate`: `lanes`, `zero_state_window`, ….

        Returns:
            Bits per character and byte, perplexity and counts.

        Raises:
            DataError: the text cannot be read or is too short; UnknownCharacterError if unknown
                characters are refused.
            ConfigError: a setting out of range.
        """
        if unknown not in get_args(UnknownPolicy):
            raise ConfigError(f"`unknown` is {unknown!r}, expected one of refuse, count")
        if isinstance(text, str):
            tokenizer, first = self.tokenizer, []
            if isinstance(tokenizer, CharTokenizer) and unknown == "count":
                first = tokenizer.unknown_in(text)[:10]
                tokenizer = KnownCharacters(tokenizer.chars)
            ids, num_chars = tokenizer.encode(text), len(text)
            num_unknown = num_chars - len(ids) if first else 0
        else:
            data = self.read(text, unknown)
            ids, num_chars = data.ids, data.num_chars
            num_unknown, first = data.num_unknown, list(data.unknown)
        result = evaluate_on(self.device, self.model, ids, self.tokenizer, **settings)
        if num_unknown:
            warnings.warn(
                f"left out {num_unknown:,} of {counted(num_chars, 'character')}, which the"
                f" vocabulary does not hold: {shown_characters(first)}",
                stacklevel=2,
            )
        return with_unknown(result, num_unknown, num_chars, first, self.tokenizer.vocab_size)

    def read(
        self, source: str | os.PathLike[str], unknown: UnknownPolicy = "refuse"
    ) -> TextDataset:
        """Encodes any source that `train` takes, with the reading options of the run.

        Args:
            source: what to read.
            unknown: see `evaluate`.

        Raises:
            DataError: the text cannot be read, or holds unknown characters that are refused.
        """
        if not isinstance(source, str | os.PathLike):
            raise DataError(
                f"the text is {kind_of_value(source)}, expected a str or a pathlib.Path"
            )
        return read_text(self.config, self.tokenizer, os.fspath(source), unknown)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LM is not picklable; pass the path of its run and call LM.load(path)")

    def _rows(self) -> list[tuple[str, str]]:
        return [*language_model_rows(self), ("weights", self.weights)]

    def __repr__(self) -> str:
        config = self.model.config
        return (
            f"LM({self.tokenizer.kind} vocabulary of {config.vocab_size}, H={config.rnn_size},"
            f" L={config.num_layers}, {self.model.num_parameters:,} parameters)"
        )


def sample_text(
    model: LanguageModel, tokenizer: Tokenizer, length: int, temperature: float, seed: int
) -> str:
    """Returns `length` tokens of text from a model in training; does not change it."""
    decoder = Decoder.of(model)
    text = begin(decoder, tokenizer, "", length, Sampling(temperature=temperature, seed=seed))
    return "".join(piece for (piece,) in write_all(decoder, [text]))
