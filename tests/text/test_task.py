"""What texts train and what their events carry."""

from __future__ import annotations

import numpy as np
import pytest

from fastlstm.errors import CorruptFileError
from fastlstm.text.data.tokenizer import CharTokenizer
from fastlstm.text.task import tokens_per_char


def test_a_token_that_the_vocabulary_lacks_is_named() -> None:
    tokenizer = CharTokenizer("abc")
    assert tokens_per_char(np.array([0, 1, 2, 2], np.uint8), tokenizer) == 1.0
    with pytest.raises(CorruptFileError, match="holds token 200, its vocabulary has 3; delete"):
        tokens_per_char(np.array([0, 200], np.uint8), tokenizer)
