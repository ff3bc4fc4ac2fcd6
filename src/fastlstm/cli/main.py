"""The `fastlstm` command: a table of verbs, and the one place where errors become exit codes.

Exit codes: 0 done; 1 the run failed; 2 bad usage or input; 69 another process of the run is lost;
75 stopped by a signal with the state saved (the same command with --resume continues); 130
interrupted; 141 output pipe closed.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import keyword
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fastlstm import __version__
from fastlstm.cli.command import Command, HelpRequested, UnknownFlagError
from fastlstm.cli.output import say
from fastlstm.distributed.launch import end_if_over, end_process, is_started_by_torchrun
from fastlstm.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USAGE,
    Dismissed,
    FastLSTMError,
    Stopped,
    UsageError,
    nearest_hint,
)
from fastlstm.system import environment
from fastlstm.system.processes import die_with_parent
from fastlstm.system.redaction import redacted, redacted_words
from fastlstm.system.signal_handlers import STOP_SIGNALS
from fastlstm.system.storage import is_own, opened, write_new

EXIT_INTERRUPTED = 130
"""128 + SIGINT, as a shell reports it."""
EXIT_PIPE_CLOSED = 141
"""128 + SIGPIPE."""
_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

GROUPS = {
    "train": {
        "train": "train a language model on a text, or a forecaster on a table",
        "tune": "find the settings with the best result within a budget",
        "prepare": "read a table of time series into the cache, checked",
    },
    "use": {
        "generate": "write text with a trained model",
        "forecast": "forecast the next steps of time series, or answer sequences",
        "serve": "serve a trained model over HTTP",
    },
    "shrink and ship": {
        "compress": "make a trained model smaller and faster, and say what it costs",
        "export": "write a model for another runtime, checked in it",
        "import": "read a model of another framework as a run",
    },
    "measure": {
        "evaluate": "measure a model on a text, a table or sequences",
        "profile": "find bottlenecks and measure what removing each one gains",
        "predict": "predict the quality of a training run from a short one",
        "scale": "predict what training on several machines gains",
        "monitor": "show any number of runs on a live page",
        "compare": "show runs side by side",
        "info": "show a run, and check its files",
        "doctor": "show this machine, its kernels, and what is missing",
    },
}
"""Heading of `fastlstm --help` -> verb -> summary."""
VERBS = [verb for verbs in GROUPS.values() for verb in verbs]
"""The module of a verb in `fastlstm.cli` (`module_of`) is imported when the verb is used."""


def console() -> NoReturn:
    """Runs the command line as a whole process and ends it with the exit code.

    A signal while the interpreter exits must not replace the exit code. Ignored signals stay
    ignored until the end, Python's own handlers do not.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by `>&-`: so that no file gets its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open to the end
    if (parent := environment.take_parent()) is not None:
        die_with_parent(parent)
    end_if_over()
    code = main()
    if is_started_by_torchrun():
        end_process(code)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code; nothing is raised."""
    # A terminal that cannot show a character gets a question mark, not a traceback.
    if (reconfigure := getattr(sys.stdout, "reconfigure", None)) is not None:
        with contextlib.suppress(OSError, ValueError):
            reconfigure(errors="replace")
    code = _run(list(sys.argv[1:] if argv is None else argv))
    error = _stdout_error()
    return code if error is None else _refused(error, code)


def _run(arguments: list[str]) -> int:
    try:
        with warnings.catch_warnings():
            # One line; Python would add a path and a line of source.
            warnings.showwarning = lambda message, *_: say(f"warning: {message}")
            return _dispatch(arguments)
    except FastLSTMError as error:
        # A stop is not an error: its message says what is saved and how to continue.
        if isinstance(error, Dismissed) or _is_said_by_other(error):
            return error.exit_code
        first, *rest = error.lines()
        if isinstance(error, Stopped):
            return error.exit_code if error.is_shown else _fail(first, error.exit_code)
        return _fail(f"error: {first}", error.exit_code, rest)
    except BrokenPipeError as error:
        return _refused(error, EXIT_OK)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:  # the last line of defence: a bug becomes one line and a log
        if isinstance(error, OSError) and (output := _stdout_error(error)) is not None:
            return _refused(output, EXIT_OK)
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            return _fail(f"error: {error.filename!s:.60}: {error.strerror}", EXIT_USAGE)
        return _internal_error(error, arguments)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(overview())
        return EXIT_OK
    if arguments[0] in ("-V", "--version"):
        sys.stdout.write(f"fastlstm {__version__}\n")
        return EXIT_OK
    verb, rest = arguments[0], arguments[1:]
    if verb != "train" and is_started_by_torchrun():
        raise UsageError(f"'{verb}' runs in one process; only train runs under torchrun")
    if verb not in VERBS:
        kind = "flag" if verb.startswith("-") else "command"
        hint = nearest_hint(verb, [*VERBS, "--help", "--version"])
        raise UsageError(f"unknown {kind} '{verb}'{hint}; commands: {', '.join(VERBS)}")
    run: Callable[[list[str]], int] = module_of(verb).run
    try:
        return run(rest)
    except HelpRequested as asked:
        sys.stdout.write(str(asked))
        return EXIT_OK
    except UnknownFlagError as error:
        flags = {other: {o.flag for c in commands(other) for o in c.options} for other in VERBS}
        others = [other for other in VERBS if other != verb and error.flag in flags[other]]
        place = f"it is an option of {', '.join(others)}; " if others else ""
        raise UsageError(f"{error}; {place}see fastlstm {verb} --help") from None


def module_of(verb: str) -> Any:
    """Returns the module of a verb: its name, with an underscore behind a keyword."""
    return importlib.import_module(f"fastlstm.cli.{verb}" + "_" * keyword.iskeyword(verb))


FORMS = {"COMMAND": "", "TABLE_COMMAND": " (tables)", "SEQUENCE_COMMAND": " (sequences)"}
"""The commands in the module of a verb, and what docs/cli.md adds to the verb."""


def commands(verb: str) -> list[Command]:
    """Returns the commands of a verb: one, or one for each kind of data."""
    module = module_of(verb)
    return [getattr(module, name) for name in FORMS if hasattr(module, name)]


def overview() -> str:
    """Returns what ``fastlstm --help`` prints."""
    rows = "\n\n".join(
        "\n".join([f"{heading}:", *(f"  {verb:<10} {text}" for verb, text in verbs.items())])
        for heading, verbs in GROUPS.items()
    )
    return f"""usage: fastlstm COMMAND ...

Train LSTMs on text and on tables of time series, and use them.

{rows}

examples:
  fastlstm train book.txt --out runs/book --budget 5m
  fastlstm generate runs/book --prompt 'Well, Prince' --length 500
  fastlstm train ETTh1.csv --horizon 96 --out runs/etth1 --budget 2m

fastlstm COMMAND --help lists the options of a command.
"""


def _is_said_by_other(error: FastLSTMError) -> bool:
    """Returns whether rank 0 of this machine reports the error."""
    is_of_all = isinstance(error, UsageError) and not error.is_of_one_rank
    return is_of_all and is_started_by_torchrun() and environment.number("LOCAL_RANK") > 0


def _fail(message: str, code: int, details: Sequence[str] = ()) -> int:
    say(message, details)
    return code


def _stdout_error(seen: OSError | None = None) -> OSError | None:
    """Returns the error of writing to standard output, or None.

    The buffer reports an error only once, so it may be the error that was `seen`.
    """
    try:
        sys.stdout.flush()
        if seen is not None and seen.filename is None and seen.errno in _REFUSALS:
            os.write(sys.stdout.fileno(), b"\n")
    except OSError as error:
        return error
    return None


def _refused(error: OSError, code: int) -> int:
    """Returns the exit code after a failed write to standard output; reports a full disk."""
    _forget_stdout()
    if isinstance(error, BrokenPipeError):
        return code or EXIT_PIPE_CLOSED
    text = f"error: cannot write to standard output ({error.strerror}); write to another place"
    return _fail(text, code or EXIT_FAILED)


def _forget_stdout() -> None:
    # The interpreter flushes stdout once more at exit and needs an open file.
    with contextlib.suppress(OSError, ValueError), opened(Path(os.devnull), os.O_WRONLY) as null:
        os.dup2(null, sys.stdout.fileno())


def _internal_error(error: Exception, arguments: list[str]) -> int:
    import traceback

    head = f"internal error: {type(error).__name__}: {error}".removesuffix(": ")
    words = redacted_words(arguments)  # hides secrets that the traceback may have, too
    trace = redacted("".join(traceback.format_exception(error)))
    if environment.value("FASTLSTM_DEBUG") not in ("", "0"):
        sys.stderr.write(trace)
        return _fail(head, EXIT_FAILED)
    about = f"fastlstm {__version__}, Python {sys.version}"
    log = _write_log(f"{about}\narguments: {words!r}\n\n{trace}")
    where = f"traceback in {log}" if log else "FASTLSTM_DEBUG=1 shows the traceback"
    return _fail(f"{head} ({where})", EXIT_FAILED)


def _write_log(text: str) -> Path | None:
    """Writes a traceback to the cache, or where that fails to the folder of temporary files."""
    import tempfile

    name = f"error-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(8).hex()}.log"
    for is_cache in (True, False):
        with contextlib.suppress(FastLSTMError, OSError):
            folder = environment.cache_dir() / "errors" if is_cache else tempfile.gettempdir()
            path = Path(folder, name)
            if is_cache:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                if not is_own(path.parent):
                    continue
            write_new(path, text.encode("utf-8", "backslashreplace"), 0o600)
            return path
    return None


if __name__ == "__main__":
    console()
