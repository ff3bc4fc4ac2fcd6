import json
import shutil
from pathlib import Path

import pytest

from fastlstm.cli.main import main


def test_a_run(tiny_run, events, printed):
    lines = [json.dumps(event) + "\n" for event in events]
    (tiny_run / "metrics.jsonl").write_text("".join(lines))
    out = printed("info", tiny_run)
    assert "embedding 8, 1 LSTM layer of 16 units" in out
    assert "char, 29 tokens" in out
    assert "1.7123 validation bits/char at step 123,456,789" in out
    assert " tokens/s in training steps\n" in out
    assert "ended        budget 2m" in out
    assert "all match their recorded SHA-256" in out


def test_a_run_as_json(tiny_run, printed):
    facts = json.loads(printed("info", tiny_run, "--json"))
    assert facts["model"]["rnn_size"] == 16
    assert facts["train"]["split"] == "80/15/5"
    assert (facts["checkpoints"], facts["damage"], facts["end"]) == ([], [], None)


def test_damage_is_shown_and_the_exit_code_is_1(tiny_run, capsys):
    path = tiny_run / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["info", str(tiny_run)]) == 1
    out = capsys.readouterr().out
    assert "damage" in out
    assert "model.safetensors" in out
    assert out.count("damage ") == 1
    assert "all match" not in out


def test_no_such_run(refused):
    assert refused("info", "nowhere").startswith("fastlstm: error: nowhere: no such run")


@pytest.mark.parametrize(
    "value", [[], {}, "x", None, True, 1e308, 10**400, [None]], ids=lambda value: repr(value)[:9]
)
def test_a_forged_end_is_shown(tiny_run, tmp_path, capsys, value):
    run = Path(shutil.copytree(tiny_run, tmp_path / "forged"))
    end = {"event": "end", "elapsed_s": 1}
    end |= dict.fromkeys(("step", "units", "train_s", "reason"), value)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(end) + "\n")
    assert main(["info", str(run)]) in (0, 1)
    assert str(run) in capsys.readouterr().out
    assert main(["info", str(run), "--json"]) in (0, 1)
    json.loads(capsys.readouterr().out)
