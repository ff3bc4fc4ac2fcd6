"""States as bytes: tied to a model, signed with a key, refused when damaged."""

import pytest

from fastlstm.errors import CorruptFileError
from fastlstm.text.session import Seal

MODEL = "ab" * 32


@pytest.mark.parametrize("key", [None, b"key"])
def test_no_byte_can_be_changed_or_left_out(key):
    seal = Seal(key, MODEL)
    blob = seal.close(b"state", b"\xc3")
    for at in range(len(blob)):
        changed = bytearray(blob)
        changed[at] ^= 1
        for bad in (bytes(changed), blob[:at], blob[:at] + blob[at + 1 :]):
            with pytest.raises(CorruptFileError, match=r"^it is "):
                seal.open(bad)
    with pytest.raises(CorruptFileError, match="it is damaged or was changed"):
        seal.open(blob + b"x")
