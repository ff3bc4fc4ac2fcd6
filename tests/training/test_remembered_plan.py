import json
from dataclasses import replace

import pytest
import torch

from fastlstm.system import environment, measurements
from fastlstm.text.config import TrainConfig
from fastlstm.training.precision import PrecisionChoice
from fastlstm.training.remembered_plan import ChosenPlan, changes, remembered_plan

CPU = torch.device("cpu")
CONFIG = TrainConfig(budget="30s")
PLAN = ChosenPlan({"rnn_size": 96}, "96 units", PrecisionChoice("bf16", "faster", 0.5), 1e6)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path))
    load(monkeypatch, is_busy=False)


def load(monkeypatch, is_busy):
    monkeypatch.setattr(measurements, "is_machine_busy", lambda _: is_busy)


def planned(config=CONFIG, size=96, left_s=25.0, device=CPU, **data):
    """Returns a plan, and whether it was made now."""
    made = list[bool]()

    def make():
        made.append(True)
        return replace(PLAN, changes={"rnn_size": size})

    return remembered_plan(config, data, device, left_s, make), bool(made)


def test_a_plan_is_made_once():
    assert planned() == (PLAN, True)
    again, is_made = planned(size=128)
    assert not is_made
    assert again == replace(PLAN, why="96 units (planned earlier)")


@pytest.mark.parametrize(
    ("config", "data"),
    [
        (replace(CONFIG, budget="31s"), {}),
        (replace(CONFIG, batch_size=8), {}),
        (replace(CONFIG, ema=0.9), {}),
        (CONFIG, {"tokens": 7}),
    ],
)
def test_other_options_or_data_have_another_plan(config, data):
    planned()
    assert planned(config, **data)[1]


def test_another_seed_has_the_same_plan():
    planned()
    assert not planned(replace(CONFIG, seed=3))[1]


def test_a_run_without_a_budget_keeps_no_plan():
    config = replace(CONFIG, budget=None, steps=5)
    assert [planned(config)[1] for _ in range(2)] == [True, True]


def test_a_plan_of_a_busy_machine_holds_until_the_machine_is_quiet(monkeypatch):
    load(monkeypatch, is_busy=True)
    assert [planned()[1] for _ in range(3)] == [True, False, False]
    load(monkeypatch, is_busy=False)
    assert planned(size=128)[0].changes == {"rnn_size": 128}
    load(monkeypatch, is_busy=True)
    assert not planned()[1]


def test_a_plan_is_made_anew_if_clearly_more_time_is_left():
    """The first run of a text may spend most of its budget on encoding it."""
    planned(left_s=5.0)
    assert not planned(left_s=6.0)[1]
    assert planned(left_s=25.0)[1]
    assert not planned(left_s=30.0)[1]


def test_a_plan_for_a_gpu_is_not_kept():
    assert [planned(device=torch.device("cuda"))[1] for _ in range(2)] == [True, True]


@pytest.mark.parametrize(
    "damage",
    [
        {"tokens": "many"}, {"tokens": -1.0}, {"tokens": 10**400}, {"tokens": None},
        {"changes": {"rnn_size": -3}}, {"changes": {"colour": 1}}, {"changes": None},
        {"changes": {"steps": 5}}, {"changes": []},
        {"precision": {"name": "fp8", "why": ""}}, {"precision": {"name": "auto", "why": ""}},
        {"precision": {"name": "fp16", "why": ""}}, {"precision": {"name": "bf16", "why": 1}},
        {"precision": 7}, {"precision": {}}, {"why": 3}, {"is_busy": None}, {"left_s": "long"},
    ],
)  # fmt: skip
def test_a_damaged_plan_is_made_again(damage):
    planned()
    (path,) = (environment.cache_dir() / "measured" / "memo").iterdir()
    value, digest = json.loads(path.read_text())
    path.write_text(json.dumps([{**value, **damage}, digest]))
    assert planned()[1]


def test_changes_are_the_options_that_differ():
    assert changes(CONFIG, replace(CONFIG, rnn_size=64, seed=0)) == {"rnn_size": 64}
