"""The kernels that write text compile for every GPU without spilling registers."""

import re

import pytest

from fastlstm.ops.cuda.compiler import compile_source

pytest.importorskip("cuda.bindings.nvrtc", reason="no NVRTC")


@pytest.mark.parametrize(
    ("arch", "operand", "threads"),
    [
        *[(arch, operand, 256) for arch in ("sm_80", "sm_90", "sm_120") for operand in range(3)],
        ("sm_80", 0, 32), ("sm_86", 1, 256), ("sm_90", 2, 32), ("sm_100", 1, 256),
    ],
)  # fmt: skip
def test_nothing_spills(arch, operand, threads):
    _, log = compile_source("decode", {"OPERAND": operand, "THREADS": threads}, arch)
    assert re.findall(r"(\d+) bytes spill stores", log) == ["0", "0"]
    assert max(map(int, re.findall(r"Used (\d+) registers", log))) <= 64
