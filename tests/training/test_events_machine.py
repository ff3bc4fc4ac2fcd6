import json

import pytest

import fastlstm
from fastlstm.system.machine_usage import MachineUsage
from fastlstm.training import events as run_events

OPTIONS = {
    **{"preset": "tiny", "rnn_size": 16, "embed_size": 8, "batch_size": 2, "seq_length": 8},
    **{"precision": "fp32", "threads": 1, "device": "cpu", "steps": 12, "eval_every": 6},
    "log_every": 1,
}


def test_events_come_when_due(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    kinds = []
    for interval_s in (0.0, 1e9):
        monkeypatch.setattr(run_events, "INTERVAL_S", interval_s)
        run = tmp_path / f"run-{interval_s}"
        fastlstm.train([text], out=run, cache_dir=str(tmp_path / "cache"), **OPTIONS)
        events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        kinds.append([event["event"] for event in events])
    assert kinds[0].count("machine") >= 12  # also within evaluations
    assert kinds[0].count("phase") > kinds[1].count("phase")  # as where a run takes ten seconds
    timed = ("machine", "phase", "message")
    others = [[k for k in run if k not in timed] for run in kinds]
    assert others[0] == others[1]


@pytest.mark.parametrize(
    ("waiting", "others", "is_told"),
    [
        *((0.6, 0.5, True), (0.6, None, True), (19.7, 0.5, True), (0.6, 0.0, False)),
        *((0.1, 0.5, False), (None, 0.5, False)),
    ],
)
def test_a_run_that_waits_for_the_cores_of_others_warns_once(
    waiting, others, is_told, tmp_path, monkeypatch
):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    known = {"waiting_threads": waiting, "others_share": others}
    used = {name: value for name, value in known.items() if value is not None}
    monkeypatch.setattr(run_events, "INTERVAL_S", 0.0)
    monkeypatch.setattr(MachineUsage, "read", lambda _: used)
    run, options = tmp_path / "run", {**OPTIONS, "threads": 2, "steps": 3, "eval_every": 3}
    fastlstm.train([text], out=run, cache_dir=str(tmp_path / "cache"), **options)
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    told = [e["text"] for e in events if "wait for a core" in str(e.get("text"))]
    shown = f"{min(waiting or 0.0, 2):.1f} of 2 threads wait for a core"
    begin = f"other processes use the CPU: {shown}; "
    assert (
        told
        == [begin + "end those processes for full speed, or give the run --threads 1"] * is_told
    )
