"""A text as a value: a `Session` reads and writes in turns; it can be saved, restored and forked.

The memory of an LSTM is its state: a few kilobytes, however long the text.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING, Any

from fastlstm.errors import CorruptFileError, PromptError, kind_of_value
from fastlstm.text.sampling import check_max_tokens, sampling_of
from fastlstm.text.writing import Pieces, Text, prompt_ids, token_stops

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fastlstm.text.data.tokenizer import Tokenizer
    from fastlstm.text.decoder import Decoder

_MAGIC = b"fastlstm-state-2\n"
_DIGEST = 32
_MODEL = 32


class Session:
    """One text on one model.

    Example:
        ```python
        session = lm.session()
        session.read("Well, Prince")
        first = session.write(200, seed=1)
        blob = session.save()  # later, or elsewhere: lm.session().restore(blob)
        ```

    `defaults` are the sampling settings for `write`.
    """

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer, defaults: Mapping[str, Any] | None = None
    ) -> None:
        self._decoder, self._tokenizer = decoder, tokenizer
        self._defaults = dict(defaults or {})
        self._stream = decoder.stream()
        self._text = tokenizer.stream_decoder()

    def read(self, text: str) -> None:
        """Reads `text`; an empty one changes nothing. Raises PromptError: an unseen character."""
        if text == "":
            return
        self._stream.feed(prompt_ids(self._tokenizer, text))
        self._stream.begin(0)
        while self._stream.is_running:
            self._decoder.run([self._stream], 1024)

    def write(self, max_tokens: int = 500, **settings: Any) -> str:
        """Returns text that continues what was read and written.

        Args:
            max_tokens: tokens to write.
            **settings: as those of `LM.generate`.

        Raises:
            PromptError: a setting out of range.
        """
        return "".join(self.stream(max_tokens, **settings))

    def stream(self, max_tokens: int = 500, **settings: Any) -> Iterator[str]:
        """Works like `write`, but yields pieces. A stop string is read but not written."""
        sampling = sampling_of(self._defaults, settings)
        check_max_tokens(max_tokens)
        stops = token_stops(self._tokenizer, sampling.stops)
        if max_tokens == 0:
            return iter(())
        if self._stream.num_waiting == 0:
            self._stream.feed(prompt_ids(self._tokenizer, ""))
        self._stream.set(sampling, stops=stops)
        self._stream.begin(max_tokens)
        text = Text(self._stream, self._text, sampling.stops)
        # If a stop string is no sequence of tokens, the text is checked after every token.
        limit = {} if len(stops) == len(sampling.stops) else {"max_steps": 1}
        return Pieces(self._decoder, [text], **limit)

    def fork(self) -> Session:
        """Returns an independent session at the same place."""
        other = Session(self._decoder, self._tokenizer, self._defaults)
        other._take(self._stream.save(), self._text.held)
        return other

    def save(self, key: bytes | None = None) -> bytes:
        """Returns the session as bytes that belong to this model.

        Args:
            key: signs the bytes, so that nobody without the key can make or change them; without a
                key they are protected against damage only.
        """
        return Seal(key, self._decoder.model_hash).close(self._stream.save(), self._text.held)

    def restore(self, blob: bytes, key: bytes | None = None) -> Session:
        """Takes over `blob`, which `save` returned for this model and `key`; returns itself.

        Raises:
            CorruptFileError: the bytes are damaged, cut, made with another key, or for another
                model.
        """
        seal = Seal(key, self._decoder.model_hash)
        try:
            self._take(*seal.open(blob))
        except (CorruptFileError, ValueError) as error:
            raise CorruptFileError(f"the session cannot be used: {error}") from None
        return self

    def _take(self, stream: bytes, held: bytes) -> None:
        text = self._tokenizer.stream_decoder(held)  # first, as refused bytes must change nothing
        self._stream.restore(stream)
        self._text = text


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
        """Returns `stream` and `held`; CorruptFileError for other bytes than from `close`."""
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
