"""`python -m fastlstm.cli.step_worker SOURCE [train options]`: a run that steps on demand.

Takes the options of `fastlstm train`. Numbers of steps are read from standard input, answers
written to standard output; what the run itself would print is dropped.
"""

from __future__ import annotations

import os
import sys

from fastlstm.cli import train
from fastlstm.cli.output import say
from fastlstm.errors import FastLSTMError


def main() -> int:
    """Sets up the training run and serves its steps; returns only when that fails."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nowhere, stream)

    from fastlstm.tuning.verification import StepServer

    try:
        return train.run(sys.argv[1:], [StepServer(requests, answers)])
    except FastLSTMError as error:
        first, *rest = error.lines()
        say(f"error: {first}", rest)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
