import itertools
import json
import time
from dataclasses import replace

import pytest
import torch

import fastlstm
from fastlstm.system import measurements
from fastlstm.text import quality_law, size_plan
from fastlstm.text.config import TrainConfig
from fastlstm.text.data.sources import open_source
from fastlstm.text.data.text import prepare_text
from fastlstm.text.size_plan import SizeCandidate, SizePlan, how_sized, step_seconds
from fastlstm.training.precision import PrecisionChoice
from recorded_gpu import use_gpu

CPU, GPU = torch.device("cpu"), torch.device("cuda")
CONFIG = TrainConfig(budget="60s", precision="fp32")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("It was the best of times, it was the worst of times. " * 2000)
    return path


@pytest.fixture
def data(text, tmp_path):
    source = open_source(str(text))
    return prepare_text(source, vocab="char", cache_dir=str(tmp_path / "cache"))


def on_a_machine(monkeypatch, gflops, optimizer_s=0.0):
    """Makes steps take what they would at so many GFLOP/s; nothing is remembered."""

    def seconds(config, *_):
        deeper = 2.0 * (config.num_layers - 1) * config.rnn_size
        flop = 24.0 * config.rnn_size * (config.rnn_size + config.embed_size + deeper)
        cost = optimizer_s if config.optimizer == "muon" else 0.0
        return flop * config.batch_size * config.seq_length / gflops / 1e9 + cost

    monkeypatch.setattr(size_plan, "step_seconds", seconds)
    monkeypatch.setattr(measurements, "recall", lambda *_: None)
    monkeypatch.setattr(measurements, "remember", lambda *_: None)


def chosen(config, data, names=()):
    ids = torch.zeros(3_000_000, dtype=torch.uint8).numpy()
    return SizePlan(config, names, ids, data.tokenizer, time.perf_counter()).choose()[0].config


def units_of(config):
    """Returns the units of all layers."""
    assert config.rnn_size is not None
    return config.rnn_size * (config.num_layers or 1)


def test_a_faster_machine_gets_a_larger_model(monkeypatch, data):
    sizes = []
    for gflops in (2, 50, 1000):
        on_a_machine(monkeypatch, gflops)
        sizes.append(units_of(chosen(replace(CONFIG, budget="4m"), data)))
    assert sizes == sorted(set(sizes)), sizes


def test_a_longer_budget_gets_a_larger_model(monkeypatch, data):
    on_a_machine(monkeypatch, 100)
    sizes = [units_of(chosen(replace(CONFIG, budget=b), data)) for b in ("15s", "2m", "1h")]
    assert sizes == sorted(set(sizes)), sizes


@pytest.mark.parametrize("gflops", [5, 60, 600])
def test_the_search_finds_the_best_of_all_sizes(monkeypatch, data, gflops):
    on_a_machine(monkeypatch, gflops)
    names = ("batch_size", "optimizer")
    bits = {}
    for size, layers in itertools.product(size_plan.EMBED_SIZES, (1, 2)):
        ids = torch.zeros(3_000_000, dtype=torch.uint8).numpy()
        plan = SizePlan(CONFIG, names, ids, data.tokenizer, time.perf_counter())
        least = 1.0 if layers == 1 else 0.99  # a second layer must clearly gain
        bits[size, layers] = plan._try_size(size, layers).bits / least
    config = chosen(CONFIG, data, names)
    assert (config.rnn_size, config.num_layers) == min(bits, key=bits.get)


def test_a_long_budget_gets_two_layers(monkeypatch, data):
    on_a_machine(monkeypatch, 5)
    layers = [chosen(replace(CONFIG, budget=b), data).num_layers for b in ("60s", "1h")]
    assert layers == [1, 2]


def test_a_slow_optimizer_is_paid_less_often_or_replaced(monkeypatch, data):
    on_a_machine(monkeypatch, 60, optimizer_s=2.0)
    config = chosen(replace(CONFIG, budget="10m"), data)
    assert (config.batch_size, config.optimizer) != (32, "muon")


def test_what_is_given_stays(monkeypatch, data):
    on_a_machine(monkeypatch, 60, optimizer_s=2.0)
    config = chosen(replace(CONFIG, batch_size=48, seq_length=96), data, ("batch_size",
        "optimizer", "seq_length"))  # fmt: skip
    assert (config.batch_size, config.optimizer, config.seq_length) == (48, "muon", 96)


def test_other_processes_slow_all_sizes_alike(monkeypatch, data):
    """Two runs of one text chose 64 and 256 units a minute apart, beside busy processes."""
    on_a_machine(monkeypatch, 10)
    slow = chosen(CONFIG, data)
    on_a_machine(monkeypatch, 30)
    alone = size_plan.step_seconds

    def disturbed(config, *rest):
        rest[-1].extend([17.0, 3.0 if config.rnn_size == size_plan.FIRST_SIZE else 5.0])
        return alone(config)

    monkeypatch.setattr(size_plan, "step_seconds", disturbed)
    assert chosen(CONFIG, data) == slow


def test_sizes_without_time_for_a_timing_are_estimated(monkeypatch, data):
    names = ("batch_size", "optimizer")
    ids = torch.zeros(3_000_000, dtype=torch.uint8).numpy()

    def bits(config):
        plan = SizePlan(CONFIG, names, ids, data.tokenizer, time.perf_counter())
        return plan._try_size(config.rnn_size, config.num_layers).bits

    for gflops in (5, 20, 200):
        on_a_machine(monkeypatch, gflops)
        timed = chosen(CONFIG, data, names)
        with monkeypatch.context() as patch:
            patch.setattr(SizePlan, "_fits", lambda *_: False)
            estimated = chosen(CONFIG, data, names)
        assert bits(estimated) <= 1.05 * bits(timed)  # of one timing


def test_planning_ends_in_time(monkeypatch, data):
    on_a_machine(monkeypatch, 1000)
    tried = []

    def slow(config, *_):
        tried.append(config.rnn_size)
        time.sleep(0.4)
        return 1e-3

    monkeypatch.setattr(size_plan, "step_seconds", slow)
    chosen(replace(CONFIG, budget="15s"), data)  # 0.75 s of planning after the first timing
    assert len(tried) <= 3


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({}, {"preset"}),
        ({"rnn_size": 64}, {"rnn_size"}),
        ({"num_layers": 2}, {"num_layers"}),
        ({"budget": None, "steps": 10}, {"steps"}),
        ({"budget": "5s"}, {"budget"}),
        ({"vocab": "bpe"}, {"vocab"}),
    ],
)
def test_runs_whose_size_is_not_chosen(change, names):
    assert how_sized(CONFIG, {"budget"}, 10**6) == "searched"
    assert how_sized(CONFIG, None, 10**6) == "as given"
    assert how_sized(replace(CONFIG, **change), names, 10**6) == "as given"


def test_short_texts_get_a_small_model():
    assert how_sized(CONFIG, {"budget"}, 10_000) == "tiny"
    assert how_sized(replace(CONFIG, budget="5s"), {"budget"}, 10_000) == "tiny"
    assert how_sized(CONFIG, {"budget", "rnn_size"}, 10_000) == "as given"
    assert how_sized(replace(CONFIG, budget=None, steps=9), {"steps"}, 10_000) == "as given"


def on_a_gpu(monkeypatch, half_gain=2.0, rows_s=1e-6):
    """Makes steps take what they would on a GPU: some for each time step, little for each row."""

    def seconds(config, *_):
        units = config.rnn_size * config.num_layers
        step_s = 1e-6 * config.seq_length * units / 256 + rows_s * config.batch_size
        return step_s * {"tf32": half_gain, "fp16": 1.05, "bf16": 1.0}[config.precision]

    use_gpu(monkeypatch)
    monkeypatch.setattr(size_plan, "step_seconds", seconds)
    monkeypatch.setattr(measurements, "recall", lambda *_: None)
    monkeypatch.setattr(measurements, "remember", lambda *_: None)


def planned_on_a_gpu(config, data, names=("budget",), num_tokens=100_000_000):
    ids = torch.zeros(num_tokens, dtype=torch.uint8).numpy()
    plan = SizePlan(config, names, ids, data.tokenizer, time.perf_counter(), GPU)
    return plan.choose()[0], plan


def test_a_gpu_gets_a_large_model_in_the_fastest_precision(monkeypatch, data):
    on_a_gpu(monkeypatch)
    config = replace(CONFIG, precision="auto")
    best, plan = planned_on_a_gpu(config, data, ("budget", "batch_size"))
    assert (best.config.rnn_size, best.config.num_layers) == (1024, 2)
    choice = plan.precision(best, "auto")
    assert choice.name == "bf16"
    assert "in tf32" in choice.why
    tokens = best.config.batch_size * best.config.seq_length
    assert choice.step_s == pytest.approx(tokens / best.tokens_per_s)


def test_a_gpu_reads_a_short_text_often_with_a_smaller_model(monkeypatch, data):
    """On an H100, War and Peace in 60 s: 1.468 bits/char, and 1.495 with two layers of 1,024."""
    on_a_gpu(monkeypatch)
    rates = {(512, 1): 6.5e6, (512, 2): 4.5e6, (1024, 1): 1.3e6, (1024, 2): 0.67e6}

    def seconds(config, *_):
        tokens = config.batch_size * config.seq_length
        return tokens / rates.get((config.rnn_size, config.num_layers), 7e6)

    monkeypatch.setattr(size_plan, "step_seconds", seconds)
    best, _ = planned_on_a_gpu(CONFIG, data, num_tokens=2_904_764)
    assert (best.config.rnn_size, best.config.num_layers) == (512, 2)


def test_a_gpu_that_gains_nothing_by_halves_trains_in_tf32(monkeypatch, data):
    on_a_gpu(monkeypatch, half_gain=1.02)
    assert planned_on_a_gpu(replace(CONFIG, precision="auto"), data)[0].config.precision == "tf32"
    asked = planned_on_a_gpu(replace(CONFIG, precision="bf16"), data)
    assert asked[0].config.precision == "bf16"
    assert asked[1].precision(asked[0], "bf16").why == "as asked"


def test_sizes_without_memory_are_left_out(monkeypatch, data):
    on_a_gpu(monkeypatch)
    fits = size_plan.step_seconds

    def seconds(config, *rest):
        if config.rnn_size * config.num_layers > 1024:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return fits(config, *rest)

    monkeypatch.setattr(size_plan, "step_seconds", seconds)
    best, _ = planned_on_a_gpu(replace(CONFIG, precision="auto"), data)
    assert best.config.rnn_size * best.config.num_layers <= 1024
    monkeypatch.setattr(
        size_plan, "step_seconds", lambda *_: seconds(replace(CONFIG, rnn_size=2048, num_layers=1))
    )
    none, plan = planned_on_a_gpu(replace(CONFIG, precision="auto"), data)
    assert none.tokens_per_s == plan.precision(none, "auto").step_s == 0.0


def test_planning_on_a_gpu_takes_a_second_or_two(monkeypatch, data):
    on_a_gpu(monkeypatch)
    tried = []

    def slow(config, *_):
        tried.append(config)
        time.sleep(0.5)
        return 1e-3

    monkeypatch.setattr(size_plan, "step_seconds", slow)
    planned_on_a_gpu(replace(CONFIG, precision="auto", budget="1h"), data)
    assert len(tried) <= 3


def test_timing_leaves_random_numbers_alone(data):
    before = torch.get_rng_state()
    config = replace(CONFIG, rnn_size=16, embed_size=8, batch_size=4, seq_length=16)
    assert 0 < step_seconds(config, data.ids, data.tokenizer) < 60
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("rests_between_steps")
def test_train_takes_the_size_and_says_why(monkeypatch, text, tmp_path):
    monkeypatch.setattr(measurements, "remember", lambda *_: None)
    monkeypatch.setattr(measurements, "recall", lambda *_: None)
    monkeypatch.setattr(size_plan, "EMBED_SIZES", {16: 8, 24: 8})
    monkeypatch.setattr(size_plan, "FIRST_SIZE", 16)
    events: list[dict] = []
    fastlstm.train(
        str(text), out=tmp_path / "run", budget="12s", precision="fp32", tensorboard=False,
        sample_every=0, cache_dir=str(tmp_path / "cache"), observers=[events.append],
    )  # fmt: skip
    start = next(event for event in events if event["event"] == "start")
    assert start["model"]["rnn_size"] in (16, 24)
    notes = [event["text"] for event in events if event["event"] == "message"]
    assert any(note.startswith("chose ") for note in notes)
    stored = json.loads((tmp_path / "run/config.json").read_text())
    assert stored["train"]["rnn_size"] == start["model"]["rnn_size"]
    assert stored["given"]["rnn_size"] is None


def test_the_same_command_chooses_the_same_on_a_busy_machine(monkeypatch, data, tmp_path):
    """Two runs of one command chose 192 and 256 units, and ended at 2.14 and 2.21 bits/char."""
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path / "measured"))
    monkeypatch.setattr(measurements, "is_machine_busy", lambda _: True)
    monkeypatch.setattr(measurements.CpuTimer, "was_busy", lambda *_: True)
    ids, sizes = torch.zeros(3_000_000, dtype=torch.uint8).numpy(), []
    for speed in (1e-6, 1e-4):
        seconds = {"size": lambda config, *_, v=speed: v * config.rnn_size}
        monkeypatch.setattr(size_plan, "step_seconds", seconds["size"])
        plan = size_plan.budget_plan(
            CONFIG, (), ids, data.tokenizer, CPU, time.perf_counter(), is_new=True
        )
        sizes.append((plan.changes, plan.tokens))
    assert sizes[0] == sizes[1]
    assert plan.why.endswith("(planned earlier)")
    monkeypatch.setattr(quality_law, "_SIZE", 0.7)  # another law, another plan
    plan = size_plan.budget_plan(
        CONFIG, (), ids, data.tokenizer, CPU, time.perf_counter(), is_new=True
    )
    assert not plan.why.endswith("(planned earlier)")


@pytest.mark.parametrize(
    ("why", "size", "told"),
    [
        ("2x faster here: 1 ms a pass in bf16", 256, "2x faster here: 1 ms a pass in bf16"),
        ("1 ms in bf16", 384, "1 ms in bf16, with 256 units"),
        ("as asked", 384, "as asked"),
        ("this CPU has no bf16 instructions", 96, "this CPU has no bf16 instructions"),
    ],
)
def test_a_precision_that_was_timed_with_another_size_says_so(data, why, size, told):
    ids = torch.zeros(3_000_000, dtype=torch.uint8).numpy()
    plan = SizePlan(CONFIG, (), ids, data.tokenizer, time.perf_counter())
    best = SizeCandidate(replace(CONFIG, rnn_size=size), 1e5, 2.0)
    choice = plan.precision(best, "auto", PrecisionChoice("bf16", why, 9.0))
    assert (choice.name, choice.why) == ("bf16", told)
    assert choice.step_s == pytest.approx(32 * 128 / 1e5)
