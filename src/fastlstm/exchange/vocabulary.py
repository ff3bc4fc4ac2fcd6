"""The vocabulary of an imported text model, which its file does not hold: it is given and checked.

A model of characters knows them by numbers. Ours are in the order of Unicode, so the rows of its
embedding and of its output are put into that order: `Vocabulary.ids`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import (
    ConfigError,
    CorruptFileError,
    DataError,
    FastLSTMError,
    Setting,
    counted,
    kind_of_value,
)
from fastlstm.system.storage import parse_json, read_bytes
from fastlstm.text.data.sources import open_source
from fastlstm.text.data.tokenizer import CharTokenizer, Tokenizer, load_tokenizer

_MAX_BYTES = 64 << 20
_NO_CHARACTER = re.compile(r"|\[\w+\]|<\w+>")
"""Tokens that vocabularies have for padding and the unknown: empty, [UNK], <pad>."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of an imported model.

    Attributes:
        tokenizer: ours.
        ids: of each of its tokens the number in the imported model, shape `(V,)`.
        unused: numbers of the imported model that stand for no character.
    """

    tokenizer: Tokenizer
    ids: NDArray[np.int64]
    unused: tuple[int, ...] = ()


def read_vocabulary(
    size: int, text: str | None, chars: str | None, vocab: str | None
) -> Vocabulary:
    """Returns the vocabulary that one of three options gives.

    Args:
        size: tokens of the model.
        text: a text with all of its characters: they are numbered in the order of Unicode.
        chars: the characters in the order of the model's numbers.
        vocab: a JSON file: a list of the characters in order, an object from character to number
            or from number to character; or tokenizer.json of a run.

    Raises:
        ConfigError: none is given, or more than one.
        DataError: it is of another size, or no vocabulary.
    """
    given = {"text": text, "chars": chars, "vocab": vocab}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        came = "none came" if not names else f"{' and '.join(names)} came"
        raise ConfigError(
            f"this text model has {counted(size, 'token')}, and its file does not say which: give"
            " one of ", Setting("text"), " (the text it was trained on), ", Setting("chars"),
            " (its characters in order) and ", Setting("vocab"), f" (a JSON file); {came}. A"
            " classifier of the next token needs none: ", Setting("classes", True),
        )  # fmt: skip
    if text is not None:
        return _of_characters(sorted(_characters_of(text)), size, "text")
    if chars is not None:
        if not isinstance(chars, str):
            raise ConfigError(Setting("chars"), f" is {kind_of_value(chars)}, expected a text")
        return _of_characters(list(chars), size, "chars")
    return _of_file(Path(str(vocab)), size)


def _characters_of(text: str) -> set[str]:
    """Returns the characters of a text, read as `train` reads it."""
    from fastlstm.text.data.text import prepare_text

    tokenizer = prepare_text(open_source(text)).tokenizer
    assert isinstance(tokenizer, CharTokenizer)
    return set(tokenizer.chars)


def _of_characters(listed: list[str], size: int, option: str) -> Vocabulary:
    if len(listed) != size:
        raise DataError(
            Setting(option), f" has {counted(len(listed), 'character')}, the model has"
            f" {counted(size, 'token')}; {_hint(len(listed), size)}",
        )  # fmt: skip
    return _numbered(dict(enumerate(listed)), size, option)


def _hint(given: int, size: int) -> str:
    if given == size - 1:
        return (
            "one of them may stand for padding or unknown characters: name the numbers of the"
            ' characters in a JSON file, {"a": 1, …}'
        )
    return "give the vocabulary that the model was trained with"


def _numbered(characters: Mapping[int, str], size: int, option: str) -> Vocabulary:
    """Returns a vocabulary of characters by their numbers in the model."""
    by_char = {char: number for number, char in characters.items()}
    if len(by_char) != len(characters):
        raise DataError(Setting(option), " has the same character twice")
    wrong = next((char for char in by_char if len(char) != 1), None)
    if wrong is not None:
        raise DataError(
            Setting(option), f" has {wrong!r:.40}, which is not one character, as a text run has:"
            " a model of words or other pieces is a classifier of the next token with ",
            Setting("classes", True),
        )  # fmt: skip
    outside = next((number for number in characters if not 0 <= number < size), None)
    if outside is not None:
        raise DataError(
            Setting(option), f" has the number {outside}, the model has {counted(size, 'token')}"
        )
    ordered = sorted(by_char)
    try:
        "".join(ordered).encode("utf-8")
        tokenizer = CharTokenizer("".join(ordered))
    except ValueError as error:
        raise DataError(Setting(option), f" is no vocabulary of characters ({error})") from None
    ids = np.array([by_char[char] for char in ordered], np.int64)
    return Vocabulary(tokenizer, ids, tuple(sorted(set(range(size)) - set(ids.tolist()))))


def _of_file(path: Path, size: int) -> Vocabulary:
    try:
        data = read_bytes(path, _MAX_BYTES)
        value = parse_json(data, path, _MAX_BYTES)
    except (FastLSTMError, OSError) as error:
        raise DataError(Setting("vocab"), f": {path} is no JSON file ({error})") from None
    if isinstance(value, dict) and value.get("format") == "fastlstm-tokenizer":
        try:
            tokenizer = load_tokenizer(data, str(path))
        except CorruptFileError as error:
            raise DataError(Setting("vocab"), ": ", *error.args) from None
        if tokenizer.vocab_size != size:
            raise DataError(
                f"{path} has {counted(tokenizer.vocab_size, 'token')}, the model has {size}"
            )
        return Vocabulary(tokenizer, np.arange(size))
    numbers = _numbers_of(value, path)
    named = {number: char for number, char in numbers.items() if not _NO_CHARACTER.fullmatch(char)}
    return _numbered(named, size, "vocab")


def _numbers_of(value: Any, path: Path) -> dict[int, str]:
    """Returns number -> character of a JSON list or object."""
    if isinstance(value, list) and all(isinstance(char, str) for char in value):
        return dict(enumerate(value))
    if isinstance(value, dict) and value:
        if all(type(number) is int for number in value.values()):
            found = {number: char for char, number in value.items()}
            if len(found) != len(value):
                raise DataError(f"{path} gives two characters the same number")
            return found
        if all(isinstance(char, str) and number.isdecimal() for number, char in value.items()):
            return {int(number): char for number, char in value.items()}
    raise DataError(
        f"{path} is no vocabulary: expected a JSON list of characters, an object from character to"
        " number or from number to character, or tokenizer.json of a run"
    )
