"""Every exception fastlstm raises on purpose.

::

    FastLSTMError                exit code 1: the run failed
    ├── UsageError               exit code 2: what was asked for cannot be done as asked
    │   ├── ConfigError          an option, a YAML key or a combination of them
    │   ├── DataError            the text or table given as input
    │   ├── PromptError          a prompt or a sampling setting
    │   ├── RunDirectoryError    the run directory: missing, in use, unwritable
    │   ├── FormatError          a file of a newer format, or of another model
    │   ├── MissingExtraError    an optional dependency is not installed
    │   └── ShapeError           a tensor of the wrong shape, dtype or device
    ├── CorruptFileError         a file does not match its recorded size or SHA-256
    ├── StorageError             the disk refused a write (full, read-only, I/O error)
    ├── KernelError              no allowed kernel can run this call
    ├── NonFiniteError           NaN or Inf that training could not recover from
    ├── BudgetError              the budget was over before the first training step
    └── Stopped                  exit code 75: a signal came, the state is saved, --resume goes on

Each message says what came, what was expected and what to do.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_STOPPED = 75
"""EX_TEMPFAIL of sysexits.h: not a failure; start the same command again with --resume."""


class FastLSTMError(Exception):
    """Base class; `exit_code` is what the command line returns for it."""

    exit_code = EXIT_FAILED


class UsageError(FastLSTMError):
    """What was asked for cannot be done as asked."""

    exit_code = EXIT_USAGE


class ConfigError(UsageError, ValueError):
    """A bad option, YAML key or combination of options."""


class DataError(UsageError, ValueError):
    """The input text or table cannot be used."""


class PromptError(UsageError, ValueError):
    """A prompt or sampling setting that the model cannot follow."""


class RunDirectoryError(UsageError):
    """A run directory that is missing, in use or unwritable."""


class FormatError(UsageError):
    """A file written by a newer format, or for another model or tokenizer."""


class MissingExtraError(UsageError, ImportError):
    """An optional dependency is not installed; the message names the extra."""


class ShapeError(UsageError, ValueError):
    """A tensor argument of the wrong shape, dtype or device."""


class CorruptFileError(FastLSTMError):
    """A file does not match its recorded size or SHA-256."""


class StorageError(FastLSTMError):
    """The disk refused a write; what was stored before is intact."""


class KernelError(FastLSTMError):
    """No allowed kernel can run this call."""


class NonFiniteError(FastLSTMError):
    """NaN or Inf that training could not recover from."""


class BudgetError(FastLSTMError):
    """The budget was over before the first training step."""


class Stopped(FastLSTMError):
    """A signal asked the run to stop; its state is saved."""

    exit_code = EXIT_STOPPED


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """Returns ``" (did you mean 'x'?)"`` for the closest known name, or an empty string."""
    matches = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{matches[0]}'?)" if matches else ""
