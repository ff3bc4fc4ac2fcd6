"""`Seal`: states as bytes that leave the process, tied to one model and signed with a key."""

from __future__ import annotations

import hashlib
import hmac

from fastlstm.errors import CorruptFileError, PromptError, kind_of_value

_MAGIC = b"fastlstm-state-2\n"
_DIGEST = 32
_MODEL = 32


class Seal:
    """Closes states and opens them again; states of another model (SHA-256, in hex) are refused.

    A key signs a state; None protects against damage only.
    """

    def __init__(self, key: bytes | None, model_hash: str) -> None:
        if not isinstance(key, bytes | None):
            raise PromptError(f"the key is {kind_of_value(key)}, expected bytes")
        if key is not None and not key:
            raise PromptError("the key is empty, expected bytes that only you know")
        self._key, self._model = key, bytes.fromhex(model_hash)

    def close(self, stream: bytes, held: bytes) -> bytes:
        """Returns a saved stream and the held bytes of an unfinished character as bytes."""
        content = self._model + bytes([len(held)]) + held + stream
        return _MAGIC + self._digest(content) + content

    def open(self, blob: bytes) -> tuple[bytes, bytes]:
        """Returns `stream` and `held`; CorruptFileError for what `close` did not return."""
        if not isinstance(blob, bytes | bytearray):
            raise CorruptFileError(f"it is {kind_of_value(blob)}, expected the bytes of save()")
        digest = blob[len(_MAGIC) : len(_MAGIC) + _DIGEST]
        content = blob[len(_MAGIC) + _DIGEST :]
        if len(content) <= _MODEL or not blob.startswith(_MAGIC):
            raise CorruptFileError("it is cut short, or of another version of fastlstm")
        if not hmac.compare_digest(digest, self._digest(content)):
            raise CorruptFileError("it is damaged or was changed, or was signed with another key")
        if content[:_MODEL] != self._model:
            raise CorruptFileError("it belongs to another model or another format of its weights")
        start = _MODEL + 1 + content[_MODEL]
        return content[start:], content[_MODEL + 1 : start]

    def _digest(self, content: bytes) -> bytes:
        if self._key is None:
            return hashlib.sha256(content).digest()
        return hmac.new(self._key, content, hashlib.sha256).digest()
