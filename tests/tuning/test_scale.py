"""What `fastlstm scale` predicts from the cost of a step and the speed of a link."""

import json
import re

import pytest

import fastlstm
from fastlstm.cli.main import main
from fastlstm.errors import ConfigError
from fastlstm.system.fields import parse_rate
from fastlstm.text.config import TrainConfig
from fastlstm.tuning import scale
from fastlstm.tuning.scale import PAYLOAD, Link, StepCost, predict_scale

GIGABIT = Link(125e6, 1e-4)
COST = StepCost(
    unit="tokens", rows=128, units_per_row=128, update_s=0.03, numbers=1_400_000,
    passes=((128, 0.3), (64, 0.16), (32, 0.09), (16, 0.05)), description="made up",
)  # fmt: skip
WORDS = "--rnn-size 16 --embed-size 8 --batch-size 8 --seq-length 16 --precision fp32 --steps 10"


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(scale, "_TIMED_S", 0.01)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("1gbit", 125e6), ("100mbit", 12.5e6), ("25Gbit/s", 3.125e9), ("10 Gbps", 1.25e9),
     ("125MB/s", 125e6), ("1.5GB/s", 1.5e9), ("800kbit", 1e5)],
)  # fmt: skip
def test_speeds_of_links(text, bytes_per_s):
    assert parse_rate(text, "link") == pytest.approx(bytes_per_s)


@pytest.mark.parametrize("text", ["", "1", "1gb", "fast", "0gbit", "-1gbit", "1e9gbit", "5MB"])
def test_other_speeds_are_refused(text):
    with pytest.raises(ConfigError, match="expected the speed of a network such as 1gbit"):
        parse_rate(text, "link")


@pytest.mark.parametrize(("size", "share"), [(2, 1 / 2), (3, 2 / 3), (64, 63 / 64)])
@pytest.mark.parametrize(("wire", "width"), [("fp32", 4), ("bf16", 2)])
def test_a_sum_sends_twice_its_share_each_way(size, share, wire, width):
    slow = Link(1e4)  # so slow that only the bytes count
    sent = 2 * share * 1e6 * width
    assert slow.sum_s(1_000_000, wire, size) == pytest.approx(sent / (PAYLOAD * 1e4), rel=1e-3)


def test_latency_counts_for_each_message_of_the_ring():
    near, far = Link(12.5e6).sum_s(10**7, "fp32", 4), Link(12.5e6, 0.025).sum_s(10**7, "fp32", 4)
    assert far == pytest.approx(near + 6 * 0.025)


def test_local_steps_wait_once_in_a_round():
    ways = {way.name: way for way in predict_scale(COST, 4, GIGABIT).strong}
    assert ways["fp32 every 8"].exposed_s == pytest.approx(ways["fp32"].exposed_s / 8)
    assert ways["bf16"].compute_s == pytest.approx(0.09 + 0.03)
    assert "1.4 M" in ways["bf16"].formula


@pytest.mark.parametrize(("nodes", "strong"), [(2, 2), (7, 7), (1000, 128)])
def test_each_node_has_a_row(nodes, strong):
    found = predict_scale(COST, nodes, GIGABIT)
    assert {way.used for way in found.strong} == {strong}
    assert {way.used for way in found.weak} == {nodes}


def test_step_seconds_fall_at_most_in_proportion_to_the_rows():
    assert COST.step_s(48) == pytest.approx((0.16 + 0.09) / 2 + 0.03)
    assert COST.step_s(4) == pytest.approx(max(0.05 - 0.04 * 12 / 16, 0.05 * 4 / 16) + 0.03)


def test_a_fast_network_pays_and_a_slow_one_does_not():
    pays = predict_scale(COST, 4, Link(3e9, 1e-5))
    assert pays.best is not None
    assert pays.best.name == "fp32"  # bf16 is no clear gain
    assert 2.0 < pays.best.speedup < 4.0
    refused = predict_scale(COST, 4, Link(1e5, 1e-4))
    assert refused.best is None
    assert "one node is as fast: it takes 330 ms a step" in refused.reason
    local = predict_scale(COST, 4, Link(12.5e6, 1e-4))
    assert local.best is not None
    assert local.best.name == "fp32 every 25"
    assert "learn a little less (0.01 to 0.03 bits/char worse)" in local.reason


@pytest.mark.parametrize(
    ("words", "names"),
    [([], ["fp32", "bf16", "fp32 every 8", "fp32 every 25"]),
     (["--wire", "fp32", "--sync-every", "50"], ["fp32 every 50"])],
)  # fmt: skip
def test_scale_of_a_text(text, capsys, quick, words, names):
    argv = ["scale", str(text), *WORDS.split(), "--link", "1gbit", "--nodes", "8,2", *words]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["nodes"] for one in found["nodes"]] == [2, 8]
    assert found["step"]["rows"] == 8
    assert [rows for rows, _ in found["step"]["passes"]] == [8, 4, 2, 1]
    assert [way["name"] for way in found["nodes"][0]["strong"]] == names


def test_scale_of_a_run_shows_the_formula(text, tmp_path, capsys, quick):
    sizes = {"rnn_size": 16, "embed_size": 8, "batch_size": 6, "seq_length": 16}
    config = TrainConfig(steps=2, precision="fp32", tensorboard=False, **sizes)  # type: ignore[arg-type]
    fastlstm.train(str(text), out=tmp_path / "run", config=config, observers=[])
    words = ["--link", "10mbit", "--latency", "10s", "--nodes", "4"]  # however busy this machine
    assert main(["scale", str(tmp_path / "run"), *words]) == 0
    shown = capsys.readouterr().out
    assert "2·3/4" in shown
    assert "advice for the same batch: one node is as fast" in shown
    told = "1.5x: 1.5 times the tokens/s of one node; computes 90 %: waits 10 % of a step"
    assert " ".join(shown.split()).count(told) == 1
    assert re.search(r"fp32 [\d.]+x, computes \d+ % · bf16", shown)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "text.txt"]


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "--link is missing"), (["--link", "fast"], "`link` is 'fast'"),
     (["--link", "1gbit", "--nodes", "1"], "--nodes is '1'"),
     (["--link", "1gbit", "--nodes", "2,x"], "--nodes is '2,x'"),
     (["--link", "1gbit", "--latency", "far"], "`latency` is 'far'"),
     (["--link", "1gbit", "--sync-every", "0"], "`--sync-every` is 0")],
)  # fmt: skip
def test_wrong_options_are_refused(text, capsys, words, message):
    assert main(["scale", str(text), *words]) == 2
    assert message in capsys.readouterr().err
