"""States as bytes: tied to a model, signed with a key, refused when damaged."""

from __future__ import annotations

from typing import Any

import pytest

from fastlstm.errors import CorruptFileError, PromptError
from fastlstm.text.session import Seal

MODEL, OTHER = "ab" * 32, "cd" * 32


@pytest.mark.parametrize("key", [None, b"key"])
@pytest.mark.parametrize("held", [b"", b"\xc3", b"x" * 255])
def test_what_is_closed_opens_again(key: bytes | None, held: bytes) -> None:
    seal = Seal(key, MODEL)
    for stream in (b"", b"state"):
        assert seal.open(seal.close(stream, held)) == (stream, held)
        assert seal.open(bytearray(seal.close(stream, held))) == (stream, held)


@pytest.mark.parametrize(
    ("key", "model", "message"),
    [
        (b"other", MODEL, "signed with another key"),
        (None, MODEL, "signed with another key"),
        (b"key", OTHER, "belongs to another model"),
    ],
)
def test_another_key_and_another_model_are_refused(
    key: bytes | None, model: str, message: str
) -> None:
    blob = Seal(b"key", MODEL).close(b"state", b"")
    with pytest.raises(CorruptFileError, match=message):
        Seal(key, model).open(blob)


@pytest.mark.parametrize("key", [None, b"key"])
def test_no_byte_can_be_changed_or_left_out(key: bytes | None) -> None:
    seal = Seal(key, MODEL)
    blob = seal.close(b"state", b"\xc3")
    for at in range(len(blob)):
        changed = bytearray(blob)
        changed[at] ^= 1
        for bad in (bytes(changed), blob[:at], blob[:at] + blob[at + 1 :]):
            with pytest.raises(CorruptFileError, match=r"^it is "):
                seal.open(bad)
    with pytest.raises(CorruptFileError, match="it is damaged or was changed"):
        seal.open(blob + b"x")


def test_what_is_no_state_and_no_key_is_named() -> None:
    blob: Any = "text"
    with pytest.raises(CorruptFileError, match=r"it is a str, expected the bytes of save\(\)"):
        Seal(None, MODEL).open(blob)
    key: Any = "key"
    with pytest.raises(PromptError, match="the key is a str, expected bytes"):
        Seal(key, MODEL)
    with pytest.raises(PromptError, match="the key is empty"):
        Seal(b"", MODEL)
