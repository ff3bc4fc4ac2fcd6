"""The encoding of a text that is not UTF-8, guessed by charset-normalizer."""

from __future__ import annotations

import re

_SAMPLE_BYTES = 1 << 16
_UNICODE = ("utf_8", "ascii")
_USUAL = {"gb2312": "gb18030", "gbk": "gb18030", "mac_cyrillic": "cp1251"}
"""Encodings that replace others: they read the same bytes and more, or are far more usual."""
_COMMON = [
    *("utf_16", "utf_16_le", "utf_16_be", "cp1252", "iso8859_15", "cp1250", "cp1251", "cp1253"),
    *("cp1254", "cp1255", "cp1256", "cp1257", "koi8_r", "tis_620", "gb18030", "big5", "cp932"),
    *("shift_jis", "euc_jp", "euc_kr", "cp949"),
]
"""Tried first: a short text often fits a code page of DOS as well."""
_OLD = ["cp850", "cp852", "cp866", "mac_roman"]
_LATIN = ("latin_1", "iso8859_", "cp125", "mac_", "cp437", "cp85", "cp1140")
_NOT_CP1252 = {
    *("Polish", "Czech", "Hungarian", "Slovak", "Slovene", "Croatian", "Romanian"),
    *("Russian", "Ukrainian", "Bulgarian", "Serbian", "Greek", "Hebrew", "Arabic", "Turkish"),
}
"""Languages with letters that cp1252 lacks; cp1252 has the letters of all other Latin texts."""


def encoding_of(data: bytes) -> str | None:
    """Returns the name of the most likely encoding, or None if it is UTF-8 or none is likely.

    Args:
        data: the beginning of a text, which may end within a character.
    """
    try:
        data[: len(data) - _cut(data)].decode("utf-8")
        return None
    except UnicodeDecodeError as error:
        begin = max(error.start - _SAMPLE_BYTES // 2, 0)
    sample = data[begin - begin % 4 : begin + _SAMPLE_BYTES]
    num_others = len(sample) - len(sample.decode("ascii", "ignore"))
    num_invalid = sample.decode("utf-8", "replace").count("\ufffd")
    if num_invalid < num_others / 4:  # damaged UTF-8
        return None
    from charset_normalizer import from_bytes

    lists = _COMMON, _OLD, None
    best = next(filter(None, (from_bytes(sample, cp_isolation=few).best() for few in lists)), None)
    if best is None or best.encoding in _UNICODE:
        return None
    is_latin = best.encoding.startswith(_LATIN) or not re.search(rb"[\x80-\xff]{2}|\0", sample)
    if not is_latin or best.language in _NOT_CP1252:
        return _USUAL.get(best.encoding, best.encoding)
    has_euro = b"\xa4" in sample and not re.search(rb"[\x80-\x9f]", sample)
    latin = "iso8859-15" if has_euro else "cp1252"
    if len(sample.decode(latin, "ignore")) == len(sample):
        return latin
    return best.encoding if best.encoding.startswith(_LATIN) else _OLD[0]


def _cut(data: bytes) -> int:
    """Returns the number of last bytes that may be an incomplete UTF-8 character."""
    for back in range(1, min(3, len(data)) + 1):
        if data[-back] >= 0xC0:
            return back
    return 0
