"""Every exception fastlstm raises on purpose.

```text
FastLSTMError                exit code 1: the run failed
├── UsageError               exit code 2: what was asked for cannot be done as asked
│   ├── ConfigError          an option, a YAML key or a combination of them
│   ├── DataError            the text or table given as input
│   │   ├── DataErrors       several errors of one table
│   │   └── UnknownCharacterError   characters that are not in a vocabulary
│   ├── PromptError          a prompt or a sampling setting
│   ├── QualityError         a compressed model is worse than max_loss allows
│   ├── RunDirectoryError    the run directory: missing, in use, unwritable
│   ├── FormatError          a file of a newer format, or of another model
│   ├── MissingExtraError    an optional dependency is not installed
│   └── ShapeError           a tensor of the wrong shape, dtype or device
├── CorruptFileError         a file does not match its recorded size or SHA-256
├── ExportError              an exported model computes something else in its runtime
├── StorageError             the disk refused a write (full, read-only, I/O error)
├── KernelError              no allowed kernel can run this call
├── DeviceMemoryError        a GPU has too little memory, even for the smallest part of a step
├── NonFiniteError           NaN or Inf that training could not recover from
├── BudgetError              the budget was over before the first training step
├── DistributedError         exit code 69: a process of a distributed run is lost
└── Stopped                  exit code 75: stopped by a signal, state saved; use --resume
```

Each message says what came, what was expected and what to do. Names of settings and commands
stand in backticks: ```gaps='fill'``` is an argument in Python; the command line shows it as the
flag ``--gaps fill``, the server as the parameter ``gaps=fill`` (`respelled`).
"""

from __future__ import annotations

import ast
import os
import re
import shlex
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_LOST = 69
"""EX_UNAVAILABLE of sysexits.h: another process of the run is lost; a restart may help."""
EXIT_STOPPED = 75
"""EX_TEMPFAIL of sysexits.h: not a failure; start the same command again with --resume."""


def counted(number: float, noun: str) -> str:
    """Returns a number with its noun: ``1 row``, ``1,234 rows``, ``0.5 epochs``, ``2 series``."""
    text = f"{number:,.15g}"
    return f"{text} {noun}" if text == "1" or noun.endswith("s") else f"{text} {noun}s"


def kind_of_value(value: object) -> str:
    """Returns the kind of a value: ``None``, ``an int``, ``a DataFrame``."""
    name = type(value).__name__
    if value is None:
        return "None"
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


_SETTING = re.compile(r"""`([a-z_0-9]+)=('[^'\n]*'|"[^"\n]*"|[^`'"\n]+)`""")
_SETTINGS = re.compile(rf"{_SETTING.pattern}(?:,? (?:and )?{_SETTING.pattern})*")


def respelled(text: str, form: Callable[[Sequence[tuple[str, Any]]], str]) -> str:
    """Returns a message with its settings in another form, such as `as_flags`."""

    def shown(settings: re.Match[str]) -> str:
        found = _SETTING.finditer(settings[0])
        return f"`{form([(one[1], _value_of(one[2])) for one in found])}`"

    return _SETTINGS.sub(shown, text)


def _value_of(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def as_flags(settings: Sequence[tuple[str, Any]]) -> str:
    """Returns settings as flags of the command line: ``--gaps fill --wide``."""
    flags = []
    for setting, value in settings:
        name = setting.replace("_", "-")
        is_switch = isinstance(value, bool)
        flags.append(f"--{'' if value or not is_switch else 'no-'}{name}")
        flags += [] if is_switch else [shlex.quote(str(value))]
    return " ".join(flags)


class FastLSTMError(Exception):
    """Base class.

    Attributes:
        exit_code: exit code of the command line.
        is_of_one_rank: whether a process other than rank 0 found the error during training.
    """

    exit_code = EXIT_FAILED
    is_of_one_rank = False

    def __str__(self) -> str:
        return "".join(map(str, self.args))

    def lines(self) -> list[str]:
        """Returns the lines that the command line shows."""
        return [str(self)]


class UsageError(FastLSTMError):
    """The request cannot be carried out as given."""

    exit_code = EXIT_USAGE


class ConfigError(UsageError, ValueError):
    """An invalid option, YAML key or combination of options."""


class DataError(UsageError, ValueError):
    """The input text or table cannot be used."""


class DataErrors(DataError):
    """Several errors of one table: a heading, then one DataError for each."""

    def __str__(self) -> str:
        return "\n".join([f"{self.args[0]}:", *(f"  - {error}" for error in self.args[1:])])

    def lines(self) -> list[str]:
        return [f"{self.args[0]}:", *(f"- {error}" for error in self.args[1:])]


class UnknownCharacterError(DataError):
    """A text has characters that are not in a model's vocabulary."""


class PromptError(UsageError, ValueError):
    """A prompt or sampling setting that the model cannot follow."""


class QualityError(UsageError):
    """A compressed model is worse than `max_loss` allows; nothing is published.

    Attributes:
        report: the measurements, in the form of compression.json.
    """

    report: dict[str, Any]


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


class ExportError(FastLSTMError):
    """An exported model computes something else in the runtime of its format."""


class StorageError(FastLSTMError):
    """A write failed; stored files are intact."""


class KernelError(FastLSTMError):
    """No allowed kernel can run this call."""


class DeviceMemoryError(FastLSTMError):
    """A GPU has too little memory for a run, even for the smallest part of a batch."""


class NonFiniteError(FastLSTMError):
    """NaN or Inf that training could not recover from."""


class BudgetError(FastLSTMError):
    """The budget was over before the first training step of the run, or of a resumed start."""


class DistributedError(FastLSTMError):
    """A distributed run lost processes too often."""


class LostProcessError(DistributedError):
    """Another process of a distributed run died or does not answer."""

    exit_code = EXIT_LOST


class Dismissed(FastLSTMError):
    """Ends a process of a distributed run silently: another one reports the error."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("another process ended the run")
        self.exit_code = exit_code


class Stopped(FastLSTMError):
    """A signal stopped the run, whose state is saved; `is_shown`: the user has seen the message."""

    exit_code = EXIT_STOPPED
    is_shown = False


_SYNONYMS = (
    "learning_rate lr eta step_size",
    "rnn_size hidden_size hidden hidden_dim hidden_units n_hidden units state_size width",
    "num_layers layers n_layers nlayers n_layer depth",
    "embed_size embedding_dim embedding_size embedding emb_size n_embd",
    "dropout drop drop_prob dropout_rate",
    "epochs epoch num_epochs n_epochs max_epochs",
    "steps step max_steps num_steps n_steps iterations iters max_iters",
    "budget max_time time_limit duration",
    "batch_size batch bs minibatch minibatch_size batchsize",
    "seq_length seq_len seqlen sequence_length context_length block_size bptt",
    "input_size lookback look_back context_length seq_length seq_len history input_length",
    "horizon prediction_length pred_len forecast_horizon steps_ahead h",
    "grad_clip clip clip_grad clip_norm max_grad_norm gradient_clip",
    "weight_decay wd l2",
    "optimizer optim opt",
    "warmup warmup_ratio warmup_steps",
    "patience early_stopping",
    "eval_every eval_interval val_every validate_every",
    "checkpoint_every save_every checkpoint_interval",
    "out output output_dir out_dir save_dir run_dir o",
    "threads num_threads workers num_workers jobs n_jobs j",
    "length max_tokens max_new_tokens num_tokens max_length",
    "temperature temp",
    "vocab tokenizer tokenization",
    "target targets label y",
    "time timestamp date ds time_column",
    "series unique_id series_id group id",
    "precision dtype amp",
    "seed random_state random_seed",
    "quantiles quantile levels level",
    "season seasonality season_length period",
    "text_field field column",
)
"""Names of the same thing in other tools; the first known name of a line is suggested."""


def nearest_hint(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Returns ``" (did you mean 'x'?)"`` for the nearest known name, or an empty string.

    Args:
        name: unknown flag, key, parameter or file.
        known: valid names.
        cutoff: required similarity of spelling; 1 suggests synonyms only.
    """
    plain, name = {_plain(word): word for word in known}, _plain(name)
    alike = (words for words in map(str.split, _SYNONYMS) if name in words)
    matches = [word for words in alike for word in words if word in plain]
    matches += get_close_matches(name, plain, n=1, cutoff=cutoff)
    return f" (did you mean '{plain[matches[0]]}'?)" if matches else ""


def _plain(word: str) -> str:
    return str(word).lstrip("-").replace("-", "_")


_PANDAS = {
    **dict.fromkeys((".xlsx", ".xlsm", ".xlsb", ".xls", ".ods"), "read_excel({!r})"),
    **dict.fromkeys((".bz2", ".xz", ".zip"), "read_csv({!r})"), ".pkl": "read_pickle({!r})",
    ".json": "read_json({!r})", ".jsonl": "read_json({!r}, lines=True)",
    ".ndjson": "read_json({!r}, lines=True)", ".orc": "read_orc({!r})",
    **dict.fromkeys((".h5", ".hdf5", ".hdf"), "read_hdf({!r})"), ".dta": "read_stata({!r})",
    ".sas7bdat": "read_sas({!r})", ".sav": "read_spss({!r})",
}  # fmt: skip
"""Tables of other programs by suffix, and how pandas reads them."""


def hint_of_other_table(path: str) -> str:
    """Returns how to convert a table of another program, or an empty string."""
    stem, suffix = os.path.splitext(path)
    if suffix.lower() not in _PANDAS:
        return ""
    read = _PANDAS[suffix.lower()].format(path)
    return f"; convert it, for example by pandas.{read}.to_parquet({stem + '.parquet'!r})"
