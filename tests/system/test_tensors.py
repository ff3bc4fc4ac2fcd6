from pathlib import Path

import pytest
import torch

from fastlstm.errors import CorruptFileError
from fastlstm.system.tensors import decode_tensors, encode_tensors

ORIGIN = Path("model.safetensors")
HEADER = b'{"a":{"dtype":"%s","shape":[%s],"data_offsets":[0,%d]}}'


def test_tensors_are_read_back():
    tensors = {
        "a": torch.arange(6.0).view(2, 3),
        "b": torch.tensor([1, -2], dtype=torch.int16),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
    }
    found = decode_tensors(encode_tensors(tensors), ORIGIN)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_views_and_shared_memory_are_stored_as_copies():
    whole = torch.arange(6.0).view(2, 3)
    tensors = {"transposed": whole.t(), "row": whole[1], "same": whole, "again": whole}
    found = decode_tensors(encode_tensors(tensors), ORIGIN)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_parameter_is_stored_without_its_graph():
    found = decode_tensors(encode_tensors({"w": torch.nn.Parameter(torch.ones(2))}), ORIGIN)
    assert not found["w"].requires_grad


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no safetensors",
        (2**60).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        encode_tensors({"a": torch.ones(4)})[:-1],
        b"\x80\x04\x95cos\nsystem\n(S'true'\ntR.",  # a pickle
        *[
            len(header).to_bytes(8, "little") + header + bytes(4)
            for header in (
                HEADER % (b"F32", b"1125899906842624", 4),
                HEADER % (b"F32", b"4611686018427387904,4", 4),
                HEADER % (b"F32", b"1", 8),
                HEADER % (b"F32", b"-1", 4),
                HEADER % (b"F99", b"1", 4),
                HEADER % (b"F4", b"8", 4),
                b"[" * 5000,
            )
        ],
    ],
)
def test_a_damaged_file_is_named(data):
    with pytest.raises(CorruptFileError, match=r"model\.safetensors: not a valid safetensors file"):
        decode_tensors(data, ORIGIN)
