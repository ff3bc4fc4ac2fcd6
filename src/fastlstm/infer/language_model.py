"""`LM`: a trained model with its tokenizer, for generating and evaluating text."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from fastlstm.data.text import prepare_text
from fastlstm.errors import DataError, PromptError
from fastlstm.infer.decode import Decoder
from fastlstm.infer.sampling import Sampler, Sampling, StopText
from fastlstm.nn.evaluation import Evaluation, evaluate
from fastlstm.nn.io import load_language_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from fastlstm.data.tokenizer import Tokenizer
    from fastlstm.nn.language_model import LanguageModel


_READING = ("text_field", "keep_crlf", "invalid_utf8", "cache_dir")
"""Settings of the run that say how a text is read."""


class LM:
    """A trained language model.

    Example:
        ::

            lm = LM.load("runs/book")
            print(lm.generate("Well, Prince", max_tokens=500, temperature=0.8))

    Attributes:
        model: the network, in evaluation mode.
        tokenizer: its vocabulary.
        config: the run's config.json: `model`, `train`, ….
        generation: the run's sampling defaults, generation_config.json.
        note: what to tell the user about the choice of weights, or None.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        config: dict[str, Any] | None = None,
        generation: dict[str, Any] | None = None,
        note: str | None = None,
    ) -> None:
        known = {field.name for field in fields(Sampling)} - {"stop", "seed"}
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.config = {} if config is None else config
        self.generation = {k: v for k, v in (generation or {}).items() if k in known}
        self.note = note
        self._decoder: Decoder | None = None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LM:
        """Loads a run directory, one of its checkpoints, or what `train()` returned.

        Raises:
            RunDirectoryError: there is no run at `path`.
            CorruptFileError: a file does not match its recorded hash; it is named.
            FormatError: written by a newer format, or with another tokenizer.
        """
        loaded = load_language_model(Path(path))
        return cls(loaded.model, loaded.tokenizer, loaded.config, loaded.generation, loaded.note)

    def generate(
        self,
        prompt: str = "",
        max_tokens: int = 500,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: str | tuple[str, ...] = (),
        seed: int | None = None,
    ) -> str:
        """Returns text that goes on from `prompt` (which is not repeated).

        A setting left out is the run's (generation_config.json), else 1.0 and everything.

        Args:
            prompt: text to continue; empty starts a new line.
            max_tokens: tokens to write: characters, with a char vocabulary.
            temperature: below 1 plays safe, above 1 dares more, 0 takes the likeliest always.
            top_k: choose among the k likeliest tokens; 0 among all.
            top_p: choose among the likeliest with this joint probability.
            repetition_penalty: above 1 makes the last 64 tokens less likely.
            stop: end before any of these texts.
            seed: makes the text repeatable, on one machine and thread count.

        Raises:
            PromptError: an unseen character in `prompt`, or a setting out of range.
            NonFiniteError: the model's weights are damaged.
        """
        return "".join(
            self.stream(
                prompt, max_tokens, temperature, top_k, top_p, repetition_penalty, stop, seed
            )
        )

    def stream(
        self,
        prompt: str = "",
        max_tokens: int = 500,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: str | tuple[str, ...] = (),
        seed: int | None = None,
    ) -> Iterator[str]:
        """As `generate`, piece by piece as it is made; a character is never split.

        The arguments are checked now, not at the first piece.
        """
        given = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "repetition_penalty": repetition_penalty,
        }
        chosen = {name: value for name, value in given.items() if value is not None}
        settings = Sampling(**{**self.generation, **chosen}, stop=stop, seed=seed)
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 0:
            raise PromptError(f"max_tokens is {max_tokens!r}, expected a whole number, 0 or more")
        ids = _prompt_ids(self.tokenizer, prompt)
        if self._decoder is None:
            self._decoder = Decoder(self.model)
        return _write(self._decoder, self.tokenizer, ids, max_tokens, settings)

    def evaluate(self, text: str | os.PathLike[str], **settings: Any) -> Evaluation:
        """Scores a text.

        Args:
            text: the text itself, or a `pathlib.Path` of a file, directory or archive of texts.
            **settings: of `nn.evaluation.evaluate`: `lanes`, `zero_state_window`, ….

        Returns:
            Bits per character and byte, perplexity and counts.

        Raises:
            DataError: the text cannot be read, holds unseen characters or is too short.
        """
        if isinstance(text, str):
            ids = self.tokenizer.encode(text)
        else:
            kind: Any = self.tokenizer.kind
            train = self.config.get("train", {})
            read_as = {name: train[name] for name in _READING if name in train}
            path = os.fspath(text)
            ids = prepare_text(path, vocab=kind, tokenizer=self.tokenizer, **read_as).ids
        return evaluate(self.model, ids, self.tokenizer, **settings)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an LM is not picklable: pass the path of its run and call LM.load(path) there"
        )

    def __repr__(self) -> str:
        config = self.model.config
        return (
            f"LM({self.tokenizer.kind} vocabulary of {config.vocab_size}, H={config.rnn_size},"
            f" L={config.num_layers}, {self.model.num_parameters:,} parameters)"
        )


def sample_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str = "",
    length: int = 200,
    temperature: float = 0.8,
    seed: int | None = None,
) -> str:
    """Returns `length` tokens of text from a model in training; its mode is kept.

    Raises:
        PromptError: an unseen character in `prompt`, or a setting out of range.
    """
    ids = _prompt_ids(tokenizer, prompt)
    settings = Sampling(temperature=temperature, seed=seed)
    return "".join(_write(Decoder(model), tokenizer, ids, length, settings))


def _write(
    decoder: Decoder,
    tokenizer: Tokenizer,
    ids: NDArray[Any],
    max_tokens: int,
    settings: Sampling,
) -> Iterator[str]:
    """Yields the text of up to `max_tokens` tokens; an unfinished last character is left out."""
    if max_tokens == 0:
        return
    sampler = Sampler(settings, tokenizer.vocab_size)
    for token in ids[-64:]:
        sampler.saw(int(token))
    text, gate = tokenizer.stream_decoder(), StopText(settings.stops)
    stream = decoder.begin(ids)
    for count in range(1, max_tokens + 1):
        token = sampler.pick(stream.logits)
        ready = gate.push(text.push(token))
        if ready:
            yield ready
        if gate.is_done:
            return
        if count < max_tokens:
            stream.step(token)
    ready = gate.flush()
    if ready:
        yield ready


def _prompt_ids(tokenizer: Tokenizer, prompt: str) -> NDArray[Any]:
    """Returns at least one id: an empty prompt starts after a line end, or the first token."""
    if not isinstance(prompt, str):
        raise PromptError(f"the prompt is {type(prompt).__name__}, expected str")
    try:
        if prompt:
            return tokenizer.encode(prompt)
    except DataError as error:
        raise PromptError(f"the prompt has {error}") from error
    try:
        return tokenizer.encode("\n")
    except DataError:
        return np.zeros(1, dtype=np.int64)
