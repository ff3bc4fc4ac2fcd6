import json
import math
import os

from fastlstm.runs.events import MetricsFile, event_line


def test_nan_becomes_null_in_strict_json():
    line = event_line({"loss": math.nan, "more": [math.inf, 1.5], "in": {"x": -math.inf}})
    assert json.loads(line) == {"loss": None, "more": [None, 1.5], "in": {"x": None}}


def test_the_name_of_a_file_that_is_not_utf8_is_escaped(tmp_path):
    event = {"event": "start", "source": os.fsdecode(b"caf\xe9.txt")}
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file(event)
    file.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_bytes()) == event


def test_lines_are_appended_and_progress_of_encoding_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        metrics = MetricsFile(path)
        metrics({"event": "step", "step": step})
        metrics({"event": "prepare", "done_bytes": 1, "total_bytes": 2})
        metrics.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
