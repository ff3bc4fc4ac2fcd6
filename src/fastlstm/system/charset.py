"""The encoding of a text that is not UTF-8, guessed by charset-normalizer."""

from __future__ import annotations

_SAMPLE_BYTES = 1 << 16
_FEWEST = 2
"""Least number of invalid bytes of a text in another encoding."""
_UNICODE = ("utf_8", "ascii")
_USUAL = {"gb2312": "gb18030", "gbk": "gb18030", "mac_cyrillic": "cp1251"}
"""A superset, or a far more usual encoding, for some that the library returns."""
_LATIN = ("latin_1", "iso8859_", "cp125", "mac_", "cp437", "cp85", "cp1140")
_NOT_CP1252 = {
    *("Polish", "Czech", "Hungarian", "Slovak", "Slovene", "Croatian", "Romanian"),
    *("Russian", "Ukrainian", "Bulgarian", "Serbian", "Greek", "Hebrew", "Arabic", "Turkish"),
}
"""Languages with letters that cp1252 lacks; it has those of all other Latin texts."""


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
    if num_invalid < max(_FEWEST, num_others / 4):  # damaged UTF-8
        return None
    from charset_normalizer import from_bytes

    best = from_bytes(sample).best()
    if best is None or best.encoding in _UNICODE:
        return None
    is_latin = best.encoding.startswith(_LATIN) and best.language not in _NOT_CP1252
    return "cp1252" if is_latin else _USUAL.get(best.encoding, best.encoding)


def _cut(data: bytes) -> int:
    """Returns the number of last bytes that may be an incomplete UTF-8 character."""
    for back in range(1, min(3, len(data)) + 1):
        if data[-back] >= 0xC0:
            return back
    return 0
