"""Which precision a run trains in: as asked, or the fastest by passes that are timed once."""

import json
import math
from typing import Any

import pytest
import torch

from fastlstm.errors import ConfigError
from fastlstm.ops.call import LSTMCall
from fastlstm.system import hardware, measurements
from fastlstm.text.config import TrainConfig
from fastlstm.training import precision as precision_module
from fastlstm.training.precision import (
    STEP_OVER_PASS,
    PrecisionChoice,
    autocast,
    choose_precision,
    notes_on,
    pass_seconds,
    require_fast_kernels,
)
from recorded_gpu import use_gpu

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measurements.CpuTimer, "was_busy", lambda *_: False)
    return tmp_path / "cache" / "measured" / "memo"


def time_precision(asked, rnn_size=16, batch=(4, 2), seconds=lambda _: 0.3):
    about = {"model": {"rnn_size": rnn_size}, "batch": list(batch)}
    return choose_precision(asked, torch.device("cpu"), about, seconds)


@pytest.mark.parametrize(
    ("half_s", "name"), [(0.2, "bf16"), (0.27, "bf16"), (0.28, "fp32"), (0.6, "fp32")]
)
def test_bf16_must_be_a_tenth_faster(monkeypatch, half_s, name):
    monkeypatch.setattr(precision_module.hardware, "may_gain_by_bf16", lambda: True)
    choice = time_precision("auto", seconds=lambda n: {"fp32": 0.3, "bf16": half_s}[n])
    step_s = STEP_OVER_PASS * (half_s if name == "bf16" else 0.3)
    assert (choice.name, choice.step_s) == (name, pytest.approx(step_s))
    assert f"{half_s * 1e3:.0f} ms a pass in bf16, 300 ms in fp32" in choice.why


def test_a_cpu_without_bf16_instructions_trains_in_fp32(monkeypatch):
    monkeypatch.setattr(precision_module.hardware, "may_gain_by_bf16", lambda: False)
    choice = time_precision("auto")
    assert (choice.name, choice.why) == ("fp32", "this CPU has no bf16 instructions")


def test_a_given_precision_needs_no_timing():
    assert choose_precision("bf16", CPU, {}, None) == PrecisionChoice("bf16", "as asked")


@pytest.mark.parametrize("name", ["fp16", "tf32"])
def test_precisions_of_gpus_are_refused_on_a_cpu(monkeypatch, name):
    with pytest.raises(ConfigError, match=f"{name}.* needs an NVIDIA GPU; on the CPU use bf16"):
        choose_precision(name, CPU, {}, None)
    monkeypatch.setattr(precision_module, "allow_tf32", lambda _: None)
    assert choose_precision(name, torch.device("cuda"), {}, None).name == name


def test_bf16_runs_in_autocast_and_fp32_does_not():
    layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        with autocast(name, CPU):
            assert layer(x).dtype == dtype


def test_a_timed_pass_leaves_weights_gradients_and_random_numbers_alone():
    layer = torch.nn.Linear(2, 2)
    before, state = layer.weight.detach().clone(), torch.get_rng_state()
    assert pass_seconds(layer, lambda: layer(torch.rand(3, 2)).sum(), "fp32", CPU) > 0.0
    assert torch.equal(layer.weight, before)
    assert layer.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_the_passes_of_a_model_are_timed_once(monkeypatch):
    timed: list[Any] = []

    def seconds(name):
        timed.append(name)
        return {"fp32": 0.3, "bf16": 0.1}[name]

    monkeypatch.setattr(precision_module.hardware, "may_gain_by_bf16", lambda: True)
    first = time_precision("auto", seconds=seconds)
    step_s = pytest.approx(STEP_OVER_PASS * 0.1)
    assert (first.name, first.step_s, first.is_recalled) == ("bf16", step_s, False)
    again = time_precision("auto", seconds=seconds)
    assert timed == ["fp32", "bf16"]
    assert (again.name, again.step_s) == (first.name, first.step_s)
    assert again.why == f"{first.why}, measured earlier"
    assert again.is_recalled
    assert time_precision("fp32", seconds=seconds).step_s == pytest.approx(STEP_OVER_PASS * 0.3)
    assert len(timed) == 2
    for rnn_size, batch in ((24, (4, 2)), (16, (8, 2))):
        assert not time_precision("fp32", rnn_size, batch, seconds).is_recalled
    assert len(timed) == 4
    monkeypatch.setattr(hardware.fastlstm, "__version__", "9.9")
    assert not time_precision("fp32", seconds=seconds).is_recalled


@pytest.mark.parametrize("seconds", [0, -1.0, "fast", None, True])
def test_times_that_make_no_sense_are_measured_again(cache, seconds):
    time_precision("fp32")
    (path,) = cache.iterdir()
    _, digest = json.loads(path.read_text())
    path.write_text(json.dumps([{"seconds": seconds}, digest]))
    assert not time_precision("fp32").is_recalled


def test_tf32_is_switched_without_timing(monkeypatch):
    switched: list[str] = []
    monkeypatch.setattr(precision_module, "allow_tf32", switched.append)
    for _ in range(2):
        time_precision("fp32")
    assert switched == ["fp32", "fp32"]


def test_passes_with_other_threads_are_timed_anew(monkeypatch):
    assert not time_precision("fp32").is_recalled
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert not time_precision("fp32").is_recalled
    assert time_precision("fp32").is_recalled


def test_a_pass_on_a_busy_machine_is_not_remembered(monkeypatch):
    """Six times too slow, it made the plan of a run that reads little: no dropout."""
    monkeypatch.setattr(measurements.CpuTimer, "was_busy", lambda *_: True)
    for _ in range(2):
        assert not time_precision("fp32").is_recalled


def test_bf16_of_our_own_kernels_is_bf16(monkeypatch):
    call, asked = LSTMCall(8, 4, 16, 16, torch.float32, "cuda", True), list[torch.dtype]()
    for refusal in (None, "cluster: this GPU has 8.0"):

        def refuse(own, refusal=refusal):
            asked.append(own.dtype)
            return refusal

        monkeypatch.setattr(precision_module, "own_refusal", refuse)
        assert bool(notes_on("bf16", GPU, call)) is (refusal is not None)
    assert asked == [torch.bfloat16] * 2


def test_bf16_of_a_torch_layer_on_a_gpu_is_noted_as_fp16():
    (note,) = notes_on("bf16", torch.device("cuda"))
    assert str(note).endswith("`precision='tf32'` has the range of fp32")
    assert notes_on("tf32", torch.device("cuda")) == notes_on("bf16", CPU) == []


@pytest.mark.parametrize(
    ("seconds", "name", "why"),
    [
        ((3e-3, 1e-3, 0.99e-3), "bf16", "3.0x faster here: 1 ms a step in bf16, 0.99 ms in fp16"),
        ((3e-3, 2e-3, 1e-3), "fp16", "3.0x faster here: 1 ms a step in fp16, 2 ms in bf16"),
        ((1e-3, 2e-3, 0.95e-3), "tf32", "fp16 gains too little here: 0.95 ms a step in fp16"),
        ((math.inf, math.inf, 1e-3), "fp16", "alone fits here: 1 ms a step in fp16"),
    ],
)
def test_a_gpu_times_three_precisions_by_whole_steps(monkeypatch, seconds, name, why):
    use_gpu(monkeypatch)
    of = dict(zip(("tf32", "bf16", "fp16"), seconds, strict=True))

    def time_step(precision):
        if math.isinf(of[precision]):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return of[precision]

    choice = choose_precision("auto", GPU, {}, time_step, "step")
    assert choice.name == name
    assert choice.why.startswith(why)
    assert choice.step_s == of[name]  # of a whole step, nothing is added


@pytest.mark.parametrize(
    ("capability", "names"), [((7, 0), ["fp32", "fp16"]), ((6, 1), ["fp32"]), ((8, 0), None)]
)
def test_an_old_gpu_is_not_timed_in_emulated_precisions(monkeypatch, capability, names):
    use_gpu(monkeypatch, capability=capability)
    timed: list[str] = []

    def seconds(name):
        timed.append(name)
        return 1.0

    choose_precision("auto", GPU, {}, seconds, "step")
    assert timed == (names or ["tf32", "bf16", "fp16"])


def test_auto_takes_the_most_exact_precision_if_no_step_fits_into_memory(monkeypatch):
    use_gpu(monkeypatch)

    def seconds(_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    choice = choose_precision("auto", GPU, {}, seconds, "step")
    assert (choice.name, choice.step_s) == ("tf32", 0.0)
    assert "inf" not in choice.why


def test_strict_kernels_are_refused_before_anything_is_read():
    call = LSTMCall(8, 4, 16, 16, torch.float32, "cpu", True)
    require_fast_kernels(TrainConfig(strict_kernels=True), call)
    slow = call._replace(device="meta")
    require_fast_kernels(TrainConfig(), slow)
