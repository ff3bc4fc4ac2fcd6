"""Removes keys, tokens and passwords from text that leaves the process."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from fastlstm.system import environment

HIDDEN = "***"
_MIN_SECRET = 6
"""A shorter secret would match other texts by chance."""
_NAMES = (
    r"(?:[\w-]*[-_])?(?:sig|signature|token|secret|password|passwd|pwd|credentials?"
    r"|(?:api|access|secret|session|account)[-_]?key)|AWSAccessKeyId|GoogleAccessId"
    r"|X-(?:Amz|Goog)-[\w-]+"
)
_PATTERNS = tuple(
    (re.compile(pattern, re.IGNORECASE), shown)
    for pattern, shown in (
        (r"([a-z][a-z0-9+.-]*://)[^/\s?#@'\":]*:[^/\s?#@'\"]*@", rf"\1{HIDDEN}@"),
        (r"((?:https?|ftp|git)://)[^/\s?#@'\"]+@", rf"\1{HIDDEN}@"),
        (rf"((?<![\w-])(?:{_NAMES})=|[?&;](?:key|code|auth)=)[^&;\s'\"#,)]+", rf"\1{HIDDEN}"),
        (rf"(['\"](?:{_NAMES})['\"]\s*:\s*['\"])[^'\"]+", rf"\1{HIDDEN}"),
        (r"\b(bearer\s+|authorization['\"]?\s*[:=]\s*['\"]?(?:\w+\s+)?)[^\s'\"]+", rf"\1{HIDDEN}"),
        (r"(https://(?:hooks\.slack\.com/services|[\w.]*discord(?:app)?\.com/api/webhooks)/)\S+",
         rf"\1{HIDDEN}"),
        (r"\b(?:(?:AKIA|ASIA)[0-9A-Z]{16}|(?:sk|hf|gh[pousr]|github_pat|xox[abeprs])[-_][\w-]{16,})",
         HIDDEN),
    )
)  # fmt: skip
_SECRET_FLAG = re.compile(r"--[\w-]*(?:key|token|secret|password)|--alert")
_own = set[str]()


def hide(secrets: Iterable[str]) -> None:
    """Adds secrets that `redacted` removes from now on."""
    _own.update(secret for secret in secrets if len(secret) >= _MIN_SECRET)
    redacted.cache_clear()


@lru_cache(maxsize=256)
def redacted(text: str) -> str:
    """Returns a text with `***` for each secret: the texts given to `hide`, the values of
    environment variables such as ``X_TOKEN``, and values in URLs, headers and settings such as
    ``sig=…``."""
    if len(text) < _MIN_SECRET:
        return text
    known = {secret for secret in environment.secrets() if len(secret) >= _MIN_SECRET}
    for secret in sorted(_own | known, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    for pattern, shown in _PATTERNS:
        text = pattern.sub(shown, text)
    return text


def redacted_words(words: Sequence[str]) -> list[str]:
    """Returns a command line with `***` for the values of flags such as ``--api-key``; `hide` gets
    these values."""
    shown, is_secret = list[str](), False
    for word in words:
        flag, is_joined, value = word.partition("=")
        has_secret = _SECRET_FLAG.fullmatch(flag) is not None
        if is_secret:
            hide([word])
            shown.append(HIDDEN)
        elif has_secret and is_joined:
            hide([value])
            shown.append(f"{flag}={HIDDEN}")
        else:
            shown.append(redacted(word))
        is_secret = has_secret and not is_joined and not is_secret
    return shown
