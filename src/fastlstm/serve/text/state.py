"""A text's state as a client keeps it: a signed blob in base64."""

from __future__ import annotations

import base64
import binascii
from typing import NamedTuple

from fastlstm.errors import CorruptFileError
from fastlstm.serve.http.errors import ApiError
from fastlstm.text.seal import Seal


class State(NamedTuple):
    """Where a text stands.

    Attributes:
        stream: what `Stream.save` returned.
        held: bytes of an unfinished character.
    """

    stream: bytes
    held: bytes


def close_state(seal: Seal, state: State) -> str:
    """Returns the blob."""
    return base64.b64encode(seal.close(*state)).decode("ascii")


def open_state(seal: Seal, text: str) -> State:
    """Returns the state in a blob.

    Raises:
        ApiError: not one that `close_state` made with this key, for this model.
    """
    try:
        return State(*seal.open(base64.b64decode(text.encode("ascii"), validate=True)))
    except (binascii.Error, UnicodeEncodeError):
        why = "it is not base64"
    except CorruptFileError as error:
        why = str(error)
    raise ApiError(
        400,
        f"session cannot be used: {why}; send what return_session gave, unchanged, or leave it out",
        "session",
        "invalid_session",
    )
