"""The encoding of a text that is not UTF-8, guessed by charset-normalizer."""

from __future__ import annotations

import codecs
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
_WORDS = re.compile(r"[^\s\d_,;|\"]+")
_ODD = r"[a-zß-ÿ][A-ZÀ-ÞŒŠŽŸ]|[£¡-¿×÷]|\ufffd"
"""What no word has: a capital letter behind a small one, a sign."""
_SIMILAR = {
    "cp1252": re.compile(
        _ODD + "|^(?=.*[ðþÐÞ])(?:(?!.*[áéíóúæÁÉÍÓÚÆ])|(?=.*[àâãäåçèêëìîïñòôõøùûü]))"
    ),
    **dict.fromkeys(("cp1254", "cp1250"), re.compile(_ODD)),
}
"""Encodings of letters that only words tell apart, and what words in them do not have."""
_RARE_LATIN = ("cp1257", "iso8859_4", "iso8859_13", "iso8859_2")
"""Rarer ones, which are guessed for a few western words too."""
_EDGES = b"\xa1\xaa\xab\xba\xbb\xbf-.:!?()"
"""¡ ª « º » ¿ and marks, which stand at the edges of words."""
_FOREIGN = ("gb18030", "big5", "cp932", "cp949", "cp1251")
"""Encodings in which few words of another have a meaning."""
_MANY_WORDS, _SHOWN = 50, 12
_LATIN = ("latin_1", "iso8859_", "cp125", "mac_", "cp437", "cp85", "cp1140")
_NOT_CP1252 = {
    *("Polish", "Czech", "Hungarian", "Slovak", "Slovene", "Croatian", "Romanian"),
    *("Russian", "Ukrainian", "Bulgarian", "Serbian", "Greek", "Hebrew", "Arabic", "Turkish"),
}
"""Languages with letters that cp1252 lacks; cp1252 has the letters of all other Latin texts."""


def guess_of(data: bytes) -> tuple[str, str] | None:
    """Returns the most likely encoding, with a word that it reads and what others make of it; None
    if it is UTF-8 or none is likely. `data` may end within a character.

    Few words do not tell western letters from Turkish and central European ones: no capital letter
    stands within a word, and Icelandic, which has ð and þ, has accents.
    """
    name = _encoding_of(data)
    if name is None:
        return None
    found = dict.fromkeys(_WORDS.findall(data.decode(name, "replace")))
    words = [word.encode(name) for word in found if not word.isascii() and "\ufffd" not in word]
    is_latin = name in (*_SIMILAR, *_RARE_LATIN)
    others = (
        [*{**_SIMILAR, name: None}] if is_latin else [*_FOREIGN] if name in _FOREIGN else [name]
    )
    if is_latin and len(words) < _MANY_WORDS:
        bare = b" ".join(word.strip(_EDGES) for word in words)
        texts = {other: bare.decode(other, "replace") for other in others}
        name = next((n for n, odd in _SIMILAR.items() if not odd.search(texts[n])), name)
    rows = [{n: word.decode(n, "replace") for n in others} for word in words[:_MANY_WORDS]]
    if not rows:
        return name, "a guess"
    shown = max(rows, key=lambda row: len({*row.values()}))
    readings = {text: n for n, text in reversed(shown.items()) if "\ufffd" not in text}  # each once
    remarks = [
        f"{n} reads {text[:_SHOWN]!r}" for text, n in readings.items() if text != shown[name]
    ]
    few = remarks[::-1] if len(words) < _MANY_WORDS else []
    return name, "; ".join([f"{shown[name][:_SHOWN]!r}, a guess", *few])


def _encoding_of(data: bytes) -> str | None:
    try:
        codecs.utf_8_decode(data, "strict", False)  # it may end within a character
        return None
    except UnicodeDecodeError as error:
        begin = max(error.start - _SAMPLE_BYTES // 2, 0)
    sample = data[begin - begin % 4 : begin + _SAMPLE_BYTES]
    num_others = len(sample) - len(sample.decode("ascii", "ignore"))
    num_invalid = sample.decode("utf-8", "replace").count("\ufffd")
    if num_invalid < num_others / 4:  # damaged UTF-8
        return None
    from charset_normalizer import from_bytes

    begin = 0 if b"\0" in sample else 3  # a text in UTF-16 has zeros
    lists = _COMMON[begin:], _OLD, None
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
