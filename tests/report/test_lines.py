"""The wording of events; a key that is missing leaves out its part."""

from __future__ import annotations

from typing import Any

import pytest

from fastlstm.report import lines
from fastlstm.report.terminal import Glyphs
from recorded_run import END, EVAL, START

FORECAST_START = {
    "event": "start", "task": "forecast", "unit": "windows", "source": "sales.csv", "rows": 1200,
    "series": 3, "frequency": "1 day", "num_units": {"train": 800, "valid": 100, "test": 100},
    "target": ["sold", "price"], "future": ["holiday"], "batch_size": 32, "balance": True,
    "model": {"input_size": 48, "horizon": 12, "patch": 4, "hidden_size": 64, "channels": "own"},
}  # fmt: skip


def rows_of(start: dict[str, Any]) -> dict[str, str]:
    joined: dict[str, str] = {}
    label = ""
    for name, text in lines.header_rows(start, Glyphs()):
        label = name or label
        joined[label] = f"{joined[label]} | {text}" if label in joined else text
    return joined


def test_the_start_of_a_text_run() -> None:
    rows = rows_of(START)
    assert rows["data"] == "data/book.txt, char vocabulary of 111"
    assert rows["model"].split(" | ")[0] == "embedding 128, 2 LSTM layers of 512 units"
    assert "138,737,500 parameters, 8.25 MFLOP per token" in rows["model"]
    assert rows["model"].endswith("variational dropout 0.1, output norm")
    known = "muon, learning rate 0.02, 32 lanes × 128 tokens × 4 per step, seed 0"
    assert rows["training"] == known
    assert rows["machine"] == "cpu, 2 threads, ceiling 412 GFLOP/s (measured)"
    how = "oneDNN, 2048x512x2048 in bf16, 2 threads, while the machine was busy"
    assert rows_of({**START, "ceiling_gflops": 0.0})["machine"] == "cpu, 2 threads", "not measured"
    machine = rows_of({**START, "ceiling_how": how})["machine"]
    assert machine.endswith(f"ceiling 412 GFLOP/s ({how})")
    assert rows["ends"] == "after 2m of wall-clock time, including the report"
    assert rows["resumed"] == "from step 1,200, after 0:36 of wall-clock time"


@pytest.mark.parametrize(
    ("about", "stages", "told"),
    [
        ({}, None, "2 on 1 machine (gloo), 1 thread each"),
        ({"threads": None, "machines": 2}, None, "2 on 2 machines (gloo)"),
        ({"wire": "bf16"}, None, "2 on 1 machine (gloo), 1 thread each, sent in bf16"),
        ({"sync_every": 25}, None,
         "2 on 1 machine (gloo), 1 thread each, weights averaged every 25 steps"),
        ({}, ["1-2", "3"], "2 on 1 machine (gloo), 1 thread each, layers 1-2 / 3"),
        ({"num": None}, None, None),
    ],
)  # fmt: skip
def test_the_start_says_how_many_processes_train(about: Any, stages: Any, told: Any) -> None:
    known = {"num": 2, "machines": 1, "backend": "gloo", "threads": 1}
    start = {**START, "processes": {**known, "sync_every": 1, "wire": "fp32", **about}}
    assert rows_of({**start, "stages": stages}).get("processes") == told


def test_an_output_of_low_rank_is_named() -> None:
    rows = rows_of({**START, "model": {**START["model"], "output_rank": 64}})
    assert rows["model"].split(" | ")[0].endswith("of 512 units, output of rank 64")


def test_the_start_of_a_forecaster() -> None:
    rows = rows_of(FORECAST_START)
    assert rows["data"] == "sales.csv, 1,200 rows of 3 series, every day"
    rows = rows_of({**FORECAST_START, "series": 1, "frequency": "rows"})
    assert rows["data"] == "sales.csv, 1,200 rows, no time column: rows are counted"
    assert rows["windows"] == (
        "800 training, 100 validation, 100 test | target sold, price; future covariates holiday"
        " | all series sampled equally often"
    )
    model = "48 steps in, 12 out, patches of 4, 1 LSTM layer of 64 units, own channels"
    assert rows["model"] == model
    assert rows["training"] == "32 windows per step"
    chunks = rows_of({**FORECAST_START, "tbptt": 24})
    assert "series in order, 24 steps per chunk, state carried over" in chunks["windows"]


def test_a_bare_start_has_no_rows() -> None:
    assert lines.header_rows({}, Glyphs()) == []


def test_an_evaluation_names_every_metric() -> None:
    parts = lines.eval_parts({**EVAL, "accuracy": 0.5})
    assert parts == [
        "step 123,456,789", "validation", "1.7123 bits/char", "1.1869 nats", "perplexity 3.277",
        "accuracy 0.5",
    ]  # fmt: skip
    assert lines.eval_parts({"step": 3, "loss": 0.25}) == ["step 3", "", "0.2500 loss"]
    pruned = lines.eval_parts({"step": 3, "loss": 0.25, "pruned": 0.6213})
    assert pruned == ["step 3", "", "0.2500 loss", "pruned to 62%"]


def test_the_end_of_a_run() -> None:
    test = {"bits_per_char": 1.75, "perplexity": 3.36, "num_units": 500, "of_units": 1000}
    spent = {"setup": 2.0, "evaluations": 1.5, "judging": 2.0, "saving": 0.01}
    end = {**END, "test": test, "spent_s": spent, "peak_memory_bytes": 2e9}
    rows = dict(lines.end_rows(end, {**START, "ceiling_gflops": 1e5}))
    assert rows["best"] == "1.7123 validation bits/char at step 123,456,789"
    assert rows["test"] == "1.7500 bits/char, perplexity 3.36, 500 of 1,000 tokens"
    assert rows["trained"] == "123,456,789 steps, 987,654,321 tokens, peak memory 2.00 GB"
    assert rows["time"] == (
        "2:01 total, setup 2.0 s (2 %), steps 114.2 s, evaluations 1.5 s, testing 2.0 s,"
        " other 1.6 s"
    )
    rate = 987_654_321 / 114.2
    share = f"{100 * rate * 8_250_000 / 1e14:.0f}%"
    assert rows["speed"].split(", ")[1] == f"{share} of the ceiling"
    rows = dict(lines.end_rows(end, START))
    assert "ceiling" not in rows["speed"], "no run is faster than the ceiling: it was wrong"


@pytest.mark.parametrize(
    ("errors", "notes"),
    [
        ({"forecaster": 1.0, "naive": 2.0, "seasonal_naive": 1.5}, []),
        ({"forecaster": 2.0, "naive": 1.0}, ["worse than the naive forecast"]),
        ({"forecaster": 1.0, "naive": 1.0}, ["no better than the naive forecast"]),
        ({"forecaster": 1.50001, "naive": 1.5}, ["no better than the naive forecast"]),
        ({"forecaster": None, "naive": 1.0}, []),
    ],
)
def test_a_forecaster_that_naive_forecasts_beat_has_a_warning(
    errors: dict[str, Any], notes: list[str]
) -> None:
    end = {**END, "test_error": {**errors, "measure": "mae"}}
    shown = lines.end_notes(end, START)
    assert [note.split(" on the test set")[0] for note in shown] == notes
    assert all("mae" in note and "do not rely on this model" in note for note in shown)
    assert lines.end_notes({**end, "reason": "stopped by SIGTERM"}, START) == []


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        ({}, True),
        ({"best_step": 100}, True),
        ({"best_step": 101}, False),
        ({"best_step": 0}, False),  # the start: another note
        ({"best_step": -1}, False),
        ({"reason": "no gain in 5 evaluations"}, False),  # it has ended by itself
        ({"caveats": ["the text is far too short"]}, False),
    ],
)
def test_a_best_step_long_before_the_end_is_told(changes: dict[str, Any], is_told: bool) -> None:
    end = {**END, "best_step": 6, "step": 201, **changes}
    best = end["best_step"]
    told = [note for note in lines.end_notes(end, START) if "is the best" in note]
    assert len(told) == is_told
    for note in told:
        assert note.startswith(f"step {best} of 201 is the best")
        assert f"the {201 - best} steps after it brought nothing" in note


def test_next_commands() -> None:
    commands = lines.next_commands(END, START)
    assert commands == [
        "fastlstm generate 'runs/a book' --length 500",
        "fastlstm evaluate 'runs/a book' OTHER_TEXT",
        "fastlstm info 'runs/a book'",
    ]  # fmt: skip
    stopped = {**END, "reason": "stopped by SIGINT", "best_step": -1, "tensorboard": "a b"}
    assert lines.next_commands({**stopped, "report": "a b/report.html"}, START) == [
        "the same command with --resume", "a b/report.html (open it in a browser)",
        "tensorboard --logdir 'a b'",
    ]  # fmt: skip
    assert lines.next_commands({**stopped, "best_step": 5, "has_model": False}, START)[1:] == [
        "tensorboard --logdir 'a b'"
    ]
    worse = {**END, "compression": {"is_published": False}, "has_model": False}
    again = "the same command with --resume and a larger --max-loss, or more --steps or --budget"
    assert lines.next_commands(worse, START) == [again]
    earlier = lines.next_commands({**worse, "has_model": True}, START)
    assert earlier == [again, *commands], "an earlier result is there"
    assert lines.next_commands(END, FORECAST_START)[0].startswith("fastlstm forecast")


@pytest.mark.parametrize(
    ("function", "event", "text"),
    [
        (lines.progress_text, {"doing": "testing", "unit": "windows", "done": 512, "total": 3389},
         "testing: 512 of 3,389 windows, 15%"),
        (lines.progress_text, {"doing": "a", "unit": "b"}, "a"),
        (lines.prepare_text, {"done_bytes": 123e6, "total_bytes": 1e9},
         "reading: 123 MB of 1.00 GB, 12%"),
        (lines.prepare_text, {"done_bytes": 123e6}, "reading: 123 MB"),
        (lines.skip_text, {"step": 5, "what": "non-finite", "tensor": "loss", "action": "rolled"},
         "step 5: non-finite in loss; rolled"),
        (lines.checkpoint_text, {"step": 5, "path": "a/checkpoint-5/", "bytes": 16.7e6,
         "seconds": 0.3}, "step 5, saved checkpoint-5, 16.7 MB, 0.30 s"),
        (lines.windows_text, {"windows": 512, "of_windows": 3389}, "512 of 3,389 windows"),
        (lines.windows_text, {"windows": 1, "of_windows": 1}, "1 window"),
    ],
)  # fmt: skip
def test_sentences(function: Any, event: dict[str, Any], text: str) -> None:
    assert function(event) == text


def test_errors_beside_naive_forecasts() -> None:
    scores = {"forecaster": {"num_values": 13440, "mae": 0.38912}, "seasonal_naive": {"mae": None}}
    rows = lines.test_rows({"scores": scores, "windows": 5, "of_windows": 9})
    assert rows == [
        ("test", "5 of 9 windows, errors in units of the table"),
        ("forecaster", "num_values 13,440  mae 0.3891"), ("seasonal naive", ""),
    ]  # fmt: skip
    assert lines.test_rows({"scores": [1]}) == []


def test_targets_of_several_units_have_an_error_each() -> None:
    targets = [
        {"target": "volume", "mae": 1e6, "naive_mae": 2e6, "seasonal_naive_mae": 9e6},
        {"target": "price", "mae": 0.5, "naive_mae": 1.0, "seasonal_naive_mae": 0.25},
        {"target": "empty"},
    ]  # fmt: skip
    event = {"scores": {"naive": {"mae": 2.0}}, "windows": 5, "of_windows": 5, "targets": targets}
    assert lines.test_rows(event) == [
        ("test", "5 windows, errors in the units of 3 targets together; rel_mae and mase have no"
         " unit"),
        ("naive", "mae 2"),
        ("mae by target (best naive forecast)", "volume 1e+06 (2e+06), price 0.5 (0.25)"),
    ]  # fmt: skip


def test_of_many_targets_the_worst_are_named_and_where_all_are() -> None:
    targets = [
        {"target": f"t{n}", "mae": n, "naive_mae": 4, "seasonal_naive_mae": 5} for n in range(7)
    ]
    targets.append({"target": "flat", "mae": 1, "naive_mae": 3, "seasonal_naive_mae": 0})
    event = {"scores": {"naive": {"mae": 2.0}}, "windows": 5, "of_windows": 5, "targets": targets}
    text = lines.test_rows(event)[-1][1]
    assert text.startswith("the worst of 8: flat 1 (0), t6 6 (4), t5 5 (4), t4 4 (4), t3 3 (4); ")
    assert text.endswith("; report.html lists all")


def test_a_long_sample_is_cut() -> None:
    shown = lines.sample_lines({"text": "\n".join("abcdefghij")}, max_lines=3)
    assert shown == ["a", "b", "c", "..."]
    assert lines.sample_lines({"text": "\n\tone\x1b\r\ntwo\n\n"}) == ["    one\\x1b", "two"]
