"""A text's state as a blob that a client keeps: signed, versioned, of one model only."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import NamedTuple

from fastlstm.serve.errors import ApiError

_MAGIC = b"fastlstm-serve-1\n"
_DIGEST = 32
_MODEL = 32
_HEAD = len(_MAGIC) + _DIGEST + _MODEL


class State(NamedTuple):
    """Where a text stands.

    Attributes:
        stream: what `Stream.save` returned.
        held: bytes of an unfinished character.
    """

    stream: bytes
    held: bytes


class Seal:
    """Makes blobs of states and opens them again.

    Args:
        key: nobody without it can make or change a blob.
        model_hash: hexadecimal SHA-256 of the model; blobs of another are refused.
    """

    def __init__(self, key: bytes, model_hash: str) -> None:
        self._key, self._model = key, bytes.fromhex(model_hash)

    def close(self, state: State) -> str:
        """Returns the blob, base64."""
        content = self._model + bytes([len(state.held)]) + state.held + state.stream
        return base64.b64encode(_MAGIC + self._digest(content) + content).decode("ascii")

    def open(self, text: str) -> State:
        """Returns the state in a blob.

        Raises:
            ApiError: not one that `close` made with this key, for this model.
        """
        try:
            blob = base64.b64decode(text.encode("ascii"), validate=True)
        except (binascii.Error, ValueError):
            raise _refused("it is not base64") from None
        if len(blob) <= _HEAD or not blob.startswith(_MAGIC):
            raise _refused("it is cut short, or of another version of fastlstm")
        digest, content = blob[len(_MAGIC) : len(_MAGIC) + _DIGEST], blob[len(_MAGIC) + _DIGEST :]
        if not hmac.compare_digest(digest, self._digest(content)):
            raise _refused("it was changed, or comes from a server with another key")
        if content[:_MODEL] != self._model:
            raise _refused("it belongs to another model or another format of its weights")
        size = content[_MODEL]
        held, stream = content[_MODEL + 1 : _MODEL + 1 + size], content[_MODEL + 1 + size :]
        return State(stream, held)

    def _digest(self, content: bytes) -> bytes:
        return hmac.new(self._key, content, hashlib.sha256).digest()


def _refused(why: str) -> ApiError:
    return ApiError(
        400,
        f"session cannot be used: {why}; send what return_session gave, unchanged, or leave it out",
        "session",
        "invalid_session",
    )
