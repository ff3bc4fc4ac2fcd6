from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from fastlstm.monitor.page import PROFILE_FILE, body, gpu_lines, profile_cards
from fastlstm.monitor.run_summary import RunSummary
from fastlstm.runs.run_directory import RunDirectory
from recorded_run import add_event

EVIL = '<img src=x onerror="alert(1)">'
VERDICT = {
    "cause": "threads", "share": 0.3, "gain": 0.79, "low": 0.43, "high": 1.25,
    "effect": "exact", "options": {"threads": 2}, "evidence": "1 -> 2", "is_recommended": True,
    "command": "fastlstm train a.txt --threads 2 --out 'b c'",
}  # fmt: skip


def read(run: Path) -> RunSummary:
    summary = RunSummary(run)
    summary.update()
    return summary


def html_of(run: Path, tmp_path: Path) -> str:
    return body([read(run)], tmp_path)


def machine(at: float, others: float) -> dict[str, Any]:
    shares = {"own_cores": 1.0, "others_share": others, "steal_share": 0.0}
    return {"event": "machine", "time": 1e9 + at, "elapsed_s": at, "cores": 2, **shares}


def test_phases_machine_and_outlook_of_a_run(write_run: Any, tmp_path: Path) -> None:
    run = write_run("a", is_ended=False)
    for at in range(1, 11):
        add_event(run, **machine(10.0 * at, 0.5 if at > 5 else 0.0))
        add_event(run, event="phase", step=at, seconds={"forward_backward": 6.0, "optimizer": 2.0})
    more = {"error": 0.02, "hour_more_bits_per_char": 1.57}
    add_event(run, event="outlook", step=9, bits_per_char=1.61, **more)
    html = html_of(run, tmp_path)
    assert "forward backward 75%" in html
    assert "more than a tenth of the machine for 45% of the time" in html
    assert "predicted final validation: 1.610 ± 0.020 bits/char; with one hour more 1.570" in html
    add_event(run, event="end", reason="done")
    assert "ends at" not in html_of(run, tmp_path)


def test_warnings_and_a_silent_run_are_shown(write_run: Any, tmp_path: Path) -> None:
    path = write_run("a", is_ended=False)
    add_event(path, event="skip", step=1001, what="loss is NaN")
    add_event(path, event="message", level="warning", text=f"alert (spike): {EVIL}")
    add_event(path, event="message", level="info", text="nothing to see")
    with RunDirectory(path).lock():
        html = html_of(path, tmp_path)
        assert ">2</span>" in html
        assert '<p class="alert">step 1,001: loss is NaN</p>' in html
        assert "alert (spike): &lt;img" in html
        assert "nothing to see" not in html
        assert "no event for" not in html
        hours_ago = time.time() - 7200.0
        os.utime(path / "metrics.jsonl", (hours_ago, hours_ago))
        assert "no event for 2:00:00" in html_of(path, tmp_path)
    assert "no event for" not in html_of(path, tmp_path)  # it is dead


def test_verdicts_of_a_profile_are_cards_with_their_commands(write_run: Any) -> None:
    run = write_run("a")
    other = {**VERDICT, "cause": "batch", "is_recommended": False}
    content = {"verdicts": [VERDICT, other]}
    (run / PROFILE_FILE).write_text(json.dumps(content), "utf-8")
    html = profile_cards(run)
    assert "threads: +79 % (+43 % to +125 %) speed" in html
    assert "fastlstm train a.txt --threads 2 --out &#x27;b c&#x27;</code>" in html
    assert "batch" not in html
    (run / PROFILE_FILE).write_text('{"verdicts": []}', "utf-8")
    assert "healthy" in profile_cards(run)
    (run / PROFILE_FILE).write_text('{"verdicts": [], "is_undecided": true}', "utf-8")
    assert "undecided: " in profile_cards(run)


@pytest.mark.parametrize(
    "content",
    ["", "[", "[1]", "7", '{"verdicts": 3}', '{"verdicts": [3]}', "[" * 99_999, "\x00", "{}"],
)
def test_a_damaged_profile_is_left_out(write_run: Any, content: str, tmp_path: Path) -> None:
    run = write_run("a")
    (run / PROFILE_FILE).write_text(content, "utf-8")
    assert "verdict" not in profile_cards(run)
    html_of(run, tmp_path)


def test_texts_and_odd_values_of_events_are_escaped(write_run: Any, tmp_path: Path) -> None:
    for value in (EVIL, None, [], {"a": [1]}, True, 10**400, -1, 0, 1e308, -1.7e308, 1e-300):
        run = write_run(f"a{abs(hash(str(value)))}", is_ended=False)
        names = ("time", "elapsed_s", "cores", "own_cores", "others_share", "steal_share")
        gpu = dict.fromkeys(("index", "busy_share", "used_bytes", "total_bytes", "power_w"), value)
        shown = {"gpus": [gpu, value], "cuda_visible_devices": value}
        add_event(run, event="machine", **dict.fromkeys(names, value), **shown)
        add_event(run, **{**machine(5.0, 0.1), **shown})
        add_event(run, event="phase", seconds=value)
        add_event(run, event="phase", seconds={EVIL: value, "b": 1.0, "c": value})
        figures = ("bits_per_char", "error", "hour_more_bits_per_char")
        add_event(run, event="outlook", **dict.fromkeys(figures, value))
        verdict = {**dict.fromkeys(VERDICT, value), "is_recommended": True}
        (run / PROFILE_FILE).write_text(json.dumps({"verdicts": [verdict]}), "utf-8")
        html = html_of(run, tmp_path)
        assert "<img" not in html
        assert "<h4>" in html


def test_gpu_lines_name_memory_of_others_and_visible_devices() -> None:
    gpu = {
        "index": 0, "busy_share": 0.97, "used_bytes": 60_000_000_000, "power_w": 301.2,
        "others_bytes": 20_000_000_000, "total_bytes": 80_000_000_000, "is_held_back": True,
    }  # fmt: skip
    html = gpu_lines({"gpus": [gpu, {"index": 1}], "cuda_visible_devices": "0"})
    assert "GPU 0: 60.0 GB of 80.0 GB, others hold 20.0 GB, 97% busy, 301 W, slowed down" in html
    assert "GPU 1: no figures" in html
    assert "CUDA_VISIBLE_DEVICES: 0" in html
    assert "CUDA_VISIBLE_DEVICES: not set" in gpu_lines({"gpus": [gpu]})
    assert gpu_lines({}) == ""
