"""The texts of a run: its source with its parts, and separate validation and test texts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import DataError, FormatError, counted
from fastlstm.text.config import PARTS, TrainConfig
from fastlstm.text.data.sources import InputText, open_source
from fastlstm.text.data.text import (
    READING,
    Splits,
    TextDataset,
    UnknownPolicy,
    prepare_text,
    split_shares,
)
from fastlstm.text.data.tokenizer import Ids, Tokenizer, shown_characters

_SHORT_TOKENS, _MUCH_UNKNOWN = 2_000, 0.01
_MIN_TOKENS = 2
"""The first token of a text has no context and is not scored."""


def open_held_out(config: TrainConfig, source: InputText) -> dict[str, InputText]:
    """Finds the texts of the options `valid` and `test`, by part, without reading them. Raises
    DataError: a text is missing, or two of source, validation and test share a file."""
    named = {part: getattr(config, part) for part in PARTS}
    given = {part: name for part, name in named.items() if name is not None}
    sources = {part: open_source(name, config.text_field) for part, name in given.items()}
    if not sources:
        return {}
    owners = dict.fromkeys(_places(source), "the source")
    for part, own in sources.items():
        for place in _places(own):
            if place in owners:
                raise _shared(place, owners[place], part)
        owners |= dict.fromkeys(_places(own), f"`{part}`")
    return sources


def _places(source: InputText) -> Iterator[str]:
    """Yields the places of a source's documents: resolved paths, or a built-in corpus's name."""
    for document in source.documents:
        yield document.name if document.path is None else os.path.realpath(document.path)


def _shared(name: str, owner: str, part: str) -> DataError:
    return DataError(
        f"{name} is given both as {owner} and as `{part}`; each needs a text of its own, or the"
        " figures mean nothing"
    )


@dataclass(frozen=True)
class RunText:
    """All text of a run: `source`, split into `shares`, and the separate texts by part."""

    source: TextDataset
    held_out: Mapping[str, TextDataset]
    shares: str

    def __post_init__(self) -> None:
        owners = {self.source.key: "the source"}
        for part, own in self.held_out.items():
            if len(own.ids) < _MIN_TOKENS:
                raise DataError(
                    f"{own.source} has {counted(len(own.ids), 'token')}, expected at least"
                    f" {_MIN_TOKENS}; give a longer text as `{part}`"
                )
            if own.key in owners:
                raise _shared(f"the text of {own.source}", owners[own.key], part)
            owners[own.key] = f"`{part}`"

    def splits(self) -> Splits:
        cut = self.source.split(self.shares, self.held_out)
        return replace(cut, **{part: own.ids for part, own in self.held_out.items()})

    def train_counts(self) -> NDArray[np.int64]:
        """Returns how often each token occurs in the training text, shape ``(V,)``."""
        return self.source.train_counts(self.shares, self.held_out)

    def notes(self) -> Iterator[str]:
        """Yields notes on the texts: where the parts come from, what was left out."""
        yield from self.source.notes
        if self.held_out:
            shares = split_shares(self.shares, self.held_out)
            names = zip(("training", *PARTS.values()), shares, strict=True)
            cut = [f"{100 * share:.4g}% {name}" for name, share in names if share > 0]
            files = [f"{PARTS[part]} on {own.source}" for part, own in self.held_out.items()]
            yield f"{self.source.source}: {', '.join(cut)}; {', '.join(files)}"
        for own in (self.source, *self.held_out.values()):
            if own is not self.source:
                yield from own.notes
            if own.num_unknown:
                yield (
                    f"{own.source}: left out {own.num_unknown:,} of"
                    f" {counted(own.num_chars, 'character')}"
                    f" ({own.num_unknown / own.num_chars:.2%}), which the vocabulary does not"
                    f" hold: {shown_characters(own.unknown)}"
                )

    def caveats(self) -> tuple[list[str], list[str]]:
        """Returns why the text teaches little, and of what text the figures tell nothing."""
        splits = self.splits()
        train, valid = len(splits.train), len(splits.valid)
        short = []
        if train < _SHORT_TOKENS:
            short.append(
                f"the text is far too short: {counted(train, 'training token')}, {valid - 1:,} are"
                " scored; the model will quote it and its figures mean little; 100 kB is a start"
            )
        if self.source.tokenizer.kind == "char" and self.source.tokenizer.vocab_size == 1:
            short.append("the text is one character, repeated: there is nothing to learn")
        return short, [
            f"the figures leave out {own.num_unknown / own.num_chars:.2%} of {own.source}:"
            " characters that the vocabulary lacks"
            for own in (self.source, *self.held_out.values())
            if own.num_unknown > _MUCH_UNKNOWN * own.num_chars
        ]


def read_text(
    config: Mapping[str, Any], tokenizer: Tokenizer, source: Any, unknown: UnknownPolicy = "refuse"
) -> TextDataset:
    """Encodes a text with the vocabulary and the reading options of a run (its config.json)."""
    train = config.get("train", {})
    read_as = {name: train[name] for name in READING if name in train}
    return prepare_text(source, tokenizer=tokenizer, unknown=unknown, **read_as)


def held_out_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the separate validation and test texts of a run, by part."""
    data = config.get("data", {})
    return {part: data[part]["source"] for part in PARTS if part in data}


def part_of(config: Mapping[str, Any], data: TextDataset, part: str | None) -> Ids:
    """Returns a part of a text, divided like the run's own text; part None is the whole text."""
    shares = config.get("train", {}).get("split", TrainConfig.split)
    return data.ids if part is None else getattr(data.split(shares, held_out_names(config)), part)


def validation_ids(config: Mapping[str, Any], tokenizer: Tokenizer) -> Ids:
    """Returns the tokens that the run with this config.json was validated on. Raises DataError:
    their text cannot be read, has unknown characters or has changed since."""
    data = config.get("data", {})
    is_separate = "valid" in held_out_names(config)
    stored = data["valid"] if is_separate else data
    text = read_text(
        config, tokenizer, stored.get("source", ""), "count" if is_separate else "refuse"
    )
    if stored.get("key", text.key) != text.key:
        raise DataError(f"{text.source} has changed since the run was trained")
    return text.ids if is_separate else part_of(config, text, "valid")


def another_text(
    run: Path, stored: Mapping[str, Any] | None, now: InputText | None, part: str | None = None
) -> FormatError:
    """Returns the error for a text other than the run's, which config.json describes (`stored`)."""
    if stored is None:
        text = f"without `{part}`; leave it out to resume"
    else:
        name, size = stored["source"], counted(stored["num_chars"], "character")
        text = f"with {name} ({size})" + ("" if part is None else f" as `{part}`")
        if now is None:
            text += "; give it to resume"
        elif name == now.name:
            text += ", which has changed since; resume with it as it was"
        else:
            text += f", not with {now.name}; resume with {name}"
    return FormatError(f"'{run}' was started {text}, or start a new run with another `out`")
