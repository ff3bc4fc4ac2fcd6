"""Reads documents as blocks of clean UTF-8: decompressed, without BOM, joined, safely cut."""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from io import BufferedIOBase, BufferedReader, BytesIO
from typing import Literal

from fastlstm.errors import DataError, counted, kind_of_value
from fastlstm.text.data.sources import Document

BLOCK_BYTES = 1 << 18
"""64 KiB to 1 MiB cost the same CPU time; 4 MiB doubled system time (page faults)."""
_MAX_SPACES = 1000
_SNIFF_BYTES = 1 << 16
_MAX_RUN_BYTES = 1 << 23
"""Limit of text without a safe cut. BPE needs 100 times its size in memory, and 0.7 s per MiB."""
_MAX_LINE_BYTES = 1 << 28
_CODECS = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd"}
"""First bytes of compressed data."""
_READ_BYTES = 1 << 18
_FORMATS = {
    "a PDF": re.compile(rb"%PDF-"),
    "an EPUB": re.compile(rb"(?s)PK\x03\x04.{26}mimetypeapplication/epub"),
    "a Word document": re.compile(rb"(?s)PK\x03\x04.{26,4000}word/|\xd0\xcf\x11\xe0"),
    "an Excel workbook": re.compile(rb"(?s)PK\x03\x04.{26,4000}xl/"),
    "a zip archive": re.compile(rb"PK\x03\x04"),
    "compressed by bzip2 or xz": re.compile(rb"BZh\d1AY&SY|\xfd7zXZ\x00"),
}
"""First bytes of files that users take for texts."""
_CONTROL = bytes(set(range(32)) - {7, 8, 9, 10, 12, 13, 27})


@dataclass(frozen=True)
class TextRules:
    """How raw bytes become text; the last five are options of `TrainConfig`.

    `is_text` is set for vocabularies char and bpe: bytes must then be text. Blocks end between
    characters, between BPE tokens, or anywhere.
    """

    is_text: bool = True
    cut: Literal["character", "token", "anywhere"] = "character"
    text_field: str = "text"
    keep_crlf: bool = False
    invalid_utf8: Literal["error", "replace"] = "error"
    encoding: str = "utf-8"
    missing_text: Literal["error", "skip"] = "error"

    @property
    def is_recoded(self) -> bool:
        """Whether the bytes are not UTF-8 and become it, for a vocabulary of bytes too."""
        return codecs.lookup(self.encoding).name != "utf-8"


class BlockReader:
    """Iterates over the documents' text in blocks, which depend on text and `block_bytes` only.

    `consumed` counts bytes on disk. `repairs` counts characters "replaced" by U+FFFD, and documents
    "skipped".
    """

    def __init__(
        self, documents: tuple[Document, ...], rules: TextRules, block_bytes: int = BLOCK_BYTES
    ) -> None:
        self.consumed, self.repairs = 0, Counter[str]()
        self._documents = documents
        self._rules = rules
        self._block_bytes = block_bytes

    def __iter__(self) -> Iterator[bytes]:
        cut = {"character": character_cut, "token": token_cut, "anywhere": len}[self._rules.cut]
        pending: list[bytes] = []
        size, wanted = 0, self._block_bytes
        for piece in self._joined():
            pending.append(piece)
            size += len(piece)
            if size < wanted:
                continue
            data = b"".join(pending)
            start = 0
            while len(data) - start >= wanted:
                end = start + cut(data[start : start + wanted])
                if end == start:
                    self._require_cut(wanted)
                    wanted *= 2  # no safe cut yet
                    continue
                yield data[start:end]
                start, wanted = end, self._block_bytes
            pending, size = [data[start:]], len(data) - start
        if size:
            yield b"".join(pending)

    def _require_cut(self, num_bytes: int) -> None:
        if num_bytes >= _MAX_RUN_BYTES:
            names = ", ".join(document.name for document in self._documents[:3])
            raise DataError(
                f"{names}: {num_bytes >> 20} MiB without a word boundary, which BPE would encode"
                " as one word; break the text into lines, or use `vocab='char'` or byte"
            )

    def _joined(self) -> Iterator[bytes]:
        """Yields the documents' pieces, with newlines between documents."""
        last = b"\n"
        for document in self._documents:
            for is_start, piece in self._pieces(document):
                if is_start and last != b"\n":
                    yield b"\n"
                last = piece[-1:]
                yield piece

    def _pieces(self, document: Document) -> Iterator[tuple[bool, bytes]]:
        """Yields (starts a document, non-empty bytes)."""
        base, name = self.consumed, document.name
        stream, position = open_document(document)
        try:
            records = {
                "plain": self._plain_records,
                "jsonl": self._json_records,
                "parquet": self._parquet_records,
            }[document.form]
            for is_start, piece in records(stream, name):
                self.consumed = base + position()
                if piece:
                    yield is_start, piece
        except OSError as error:
            if error.errno is not None:
                raise DataError(f"cannot read {name}: {error.strerror}") from error
            raise DataError(
                f"{name}: its compressed data is damaged, or padding follows it ({error});"
                " download it again, or decompress it yourself"
            ) from error
        finally:
            stream.close()
        self.consumed = base + (document.size() or 0)

    def _plain_records(self, stream: BufferedIOBase, name: str) -> Iterator[tuple[bool, bytes]]:
        rules = self._rules
        replaces = (rules.is_text or rules.is_recoded) and rules.invalid_utf8 == "replace"
        decoder = codecs.getincrementaldecoder(rules.encoding)("replace" if replaces else "strict")
        held = b""  # a CR whose LF may come in the next piece
        is_start = True
        head = stream.read(_SNIFF_BYTES)
        if rules.is_text and not rules.is_recoded:
            refuse_binary(head, name)
        chunks = _chunks(head.removeprefix(codecs.BOM_UTF8), stream, self._block_bytes)
        chunk = next(chunks, b"")
        while chunk:
            following = next(chunks, b"")
            data = chunk
            if replaces or rules.is_recoded:
                text = decoder.decode(chunk, final=not following)
                self.repairs["replaced"] += text.count("\ufffd")
                data = text.encode("utf-8", "replace" if replaces else "strict")
            if not rules.keep_crlf:
                data = held + data
                held = b"\r" if following and data.endswith(b"\r") else b""
                data = data[: len(data) - len(held)].replace(b"\r\n", b"\n")
            if data:
                yield is_start, data
                is_start = False
            chunk = following

    def _json_records(self, stream: BufferedIOBase, name: str) -> Iterator[tuple[bool, bytes]]:
        rules = self._rules
        lines = iter(lambda: stream.readline(_MAX_LINE_BYTES), b"")
        for number, line in enumerate(lines, 1):
            where = f"{name} line {number}"
            if len(line) == _MAX_LINE_BYTES:
                raise DataError(
                    f"{where} is longer than {_MAX_LINE_BYTES >> 20} MiB; expected one JSON object"
                    " per line"
                )
            line = line.removeprefix(codecs.BOM_UTF8 if number == 1 else b"")
            if line.isspace() or not line:
                continue
            text = _json_text(line, where, rules)
            if text is None:
                self.repairs["skipped"] += 1
                continue
            if not rules.keep_crlf:
                text = text.replace("\r\n", "\n")
            try:
                yield True, text.encode("utf-8")
            except UnicodeEncodeError:
                if rules.invalid_utf8 != "replace":
                    raise DataError(
                        f"{where}: the text has an unpaired surrogate, which is not a character;"
                        " fix the line or pass `invalid_utf8='replace'`"
                    ) from None
                whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                yield True, whole.encode()

    def _parquet_records(self, stream: BufferedIOBase, name: str) -> Iterator[tuple[bool, bytes]]:
        from fastlstm.text.data.parquet import texts_of  # pyarrow takes a while to import

        for number, text in enumerate(texts_of(stream, name, self._rules.text_field), 1):
            if text is None and self._rules.missing_text == "skip":
                self.repairs["skipped"] += 1
                continue
            yield True, self._parquet_text(text, f"{name} row {number}")

    def _parquet_text(self, text: bytes | None, where: str) -> bytes:
        rules = self._rules
        if text is None:
            hint = "leave out such rows with `missing_text='skip'`"
            raise DataError(f"{where}: '{rules.text_field}' is missing; {hint}")
        if rules.is_text:
            try:
                text.decode()
            except UnicodeDecodeError as error:
                if rules.invalid_utf8 != "replace":
                    raise DataError(
                        f"{where}: invalid UTF-8 at byte {error.start} of the text; fix it or pass"
                        " `invalid_utf8='replace'`"
                    ) from None
                whole = text.decode(errors="replace")
                self.repairs["replaced"] += whole.count("\ufffd")
                text = whole.encode()
        return text if rules.keep_crlf else text.replace(b"\r\n", b"\n")


def open_document(document: Document) -> tuple[BufferedIOBase, Callable[[], int]]:
    """Opens a document, decompressed; also returns a function of the position on disk."""
    if document.path is None:
        memory = BytesIO(document.data or b"")
        return memory, memory.tell
    try:
        raw = document.path.open("rb")
        head = raw.read(4)
        raw.seek(0)
    except OSError as error:
        raise DataError(f"cannot read {document.name}: {error.strerror}") from error
    for codec, magic in _CODECS.items():
        if head.startswith(magic):
            import pyarrow as pa  # takes a while

            return BufferedReader(pa.CompressedInputStream(raw, codec), _READ_BYTES), raw.tell
    suffix = document.path.suffix.lower()
    if suffix in (".gz", ".zst") and head:
        raw.close()
        kind = "gzip" if suffix == ".gz" else "zstd"
        raise DataError(f"{document.name} is named {suffix} but is not {kind} data; rename it")
    return raw, raw.tell


def _chunks(head: bytes, stream: BufferedIOBase, size: int) -> Iterator[bytes]:
    for start in range(0, len(head), size):
        yield head[start : start + size]
    while chunk := stream.read(size):
        yield chunk


def _json_text(line: bytes, where: str, rules: TextRules) -> str | None:
    """Returns the text of a line; None if the line has no text and may be skipped."""
    try:
        errors = "replace" if rules.invalid_utf8 == "replace" else "strict"
        record = json.loads(line.decode(rules.encoding, errors))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: invalid {rules.encoding.upper()} at byte {error.start} of the line; fix it"
            " or pass `invalid_utf8='replace'`"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: invalid JSON ({error}); expected one object per line") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object, got {type(record).__name__}")
    name = rules.text_field
    if rules.missing_text == "skip" and record.get(name) is None:
        return None
    if name not in record:
        fields = ", ".join(sorted(map(str, record))[:8]) or "none"
        raise DataError(
            f"{where}: no field '{name}'; its fields: {fields}. Name the text with `text_field`,"
            " or leave out such lines with `missing_text='skip'`"
        )
    text = record[name]
    if not isinstance(text, str):
        hint = "; leave out such lines with `missing_text='skip'`" if text is None else ""
        raise DataError(
            f"{where}: field '{name}' is {kind_of_value(text)}, expected a string{hint}"
        )
    return text


def refuse_binary(head: bytes, name: str) -> None:
    """Raises DataError if the first bytes of a document are not text."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{name} is UTF-16, not UTF-8; give `encoding='utf-16'`")
    kind = next((kind for kind, magic in _FORMATS.items() if magic.match(head)), None)
    if kind is not None:
        raise DataError(f"{name} is {kind}, not plain text; convert it to plain text first")
    for order, zeros in (("le", head[1::2]), ("be", head[::2])):
        if len(zeros) > 8 and zeros.count(0) > 0.7 * len(zeros) and head.count(0) < len(head) * 0.6:
            raise DataError(
                f"{name} looks like UTF-16 without a byte order mark; give"
                f" `encoding='utf-16-{order}'`"
            )
    controls = len(head) - len(head.translate(None, _CONTROL))
    if b"\x00" in head or controls > 0.1 * len(head):
        has_nul = b"\x00" in head
        what = f"a NUL at byte {head.index(0)}" if has_nul else counted(controls, "control byte")
        raise DataError(
            f"{name} looks like a binary file ({what}), expected UTF-8 text; give a text file, or"
            " pass `vocab='byte'` to model raw bytes"
        )


def character_cut(data: bytes) -> int:
    """Returns the length of `data` without an incomplete UTF-8 character at its end."""
    tail = data[-3:]
    return len(data) - len(tail) + codecs.utf_8_decode(tail, "replace", False)[1]


def token_cut(data: bytes) -> int:
    """Returns the last position that no token of a byte-level BPE crosses, or 0.

    The pattern of the BPE splits text into words of letters, digits or other signs, with at most
    one space before each word. The split does not depend on later text, so encoding block by block
    gives the ids of the whole text.
    """
    end = len(data)
    for _ in range(_MAX_SPACES):
        at = max(data.rfind(b" ", 1, end), data.rfind(b"\n", 1, end))
        if at <= 0:
            break
        if not data[max(0, at - 4) : at].decode("utf-8", "ignore")[-1:].isspace():
            return at
        end = at
    text = data[: character_cut(data)].decode("utf-8")
    for at in range(len(text) - 1, 0, -1):
        if _is_boundary(text[at - 1], text[at]):
            return len(text[:at].encode())
    return 0


def _is_boundary(left: str, right: str) -> bool:
    """Returns whether a word certainly ends between two characters."""
    kind, following = _kind(left), _kind(right)
    if "?" in (kind, following) or kind == following or kind == "space":
        return False
    return not (left == "'" and following == "letter")  # as in 's or 're


def _kind(char: str) -> str:
    """Returns the class of a character in BPE's pattern; "?" if libraries may disagree."""
    if char.isspace() and char not in "\x1c\x1d\x1e\x1f":
        return "space"
    category = unicodedata.ucd_3_2_0.category(char)  # newer characters are not known everywhere
    if category == "Cn" or category[0] == "Z" or category[0] != unicodedata.category(char)[0]:
        return "?"
    return {"L": "letter", "N": "digit"}.get(category[0], "sign")


def find_invalid_byte(
    documents: tuple[Document, ...], encoding: str = "utf-8"
) -> tuple[Document, int] | None:
    """Returns a document and the offset of its first invalid byte, reading the documents again."""
    for document in documents:
        if document.form != "plain":
            continue
        decoder, offset, chunk = codecs.getincrementaldecoder(encoding)(), 0, b"\n"
        with closing(open_document(document)[0]) as stream:
            while chunk:
                chunk = stream.read(BLOCK_BYTES)
                held = len(decoder.getstate()[0])
                try:
                    decoder.decode(chunk, final=not chunk)
                except UnicodeDecodeError as error:
                    return document, offset - held + error.start
                offset += len(chunk)
    return None
