"""Opening a trained model for a verb: what the loader has to say goes to standard error."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from fastlstm.report.terminal import one_line
from fastlstm.runs.find_run import require_run

if TYPE_CHECKING:
    from fastlstm.text.lm import LM


def open_model(path: str) -> LM:
    """Loads the model of a run or checkpoint; a note about the choice of files is printed.

    Raises:
        FastLSTMError: as `fastlstm.text.files.load_language_model`.
    """
    require_run(path, "text")

    from fastlstm.text.files import load_language_model
    from fastlstm.text.lm import LM

    loaded = load_language_model(path)
    if loaded.note:
        print(f"fastlstm: note: {one_line(loaded.note)}", file=sys.stderr, flush=True)
    return LM(loaded.model, loaded.tokenizer, loaded.config, loaded.generation)
