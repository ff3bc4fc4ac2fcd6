import json

import pytest
import torch
from safetensors.torch import save_file

from fastlstm.cli.main import main
from fastlstm.errors import EXIT_OK, EXIT_USAGE


@pytest.fixture
def state_dict(tmp_path):
    """A text model of 5 tokens as torch saves its weights."""
    model = torch.nn.ModuleDict(
        {
            "embedding": torch.nn.Embedding(5, 4),
            "lstm": torch.nn.LSTM(4, 6),
            "out": torch.nn.Linear(6, 5),
        }
    )
    path = tmp_path / "m.pt"
    torch.save(model.state_dict(), path)
    return path


@pytest.fixture
def safetensors(state_dict):
    """The same in a file that no other process needs to read."""
    path = state_dict.with_suffix(".safetensors")
    save_file(torch.load(state_dict), path)
    return path


def test_imported_run_writes_text(state_dict, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["import", str(state_dict), "--chars", "ab cd", "--out", str(out)]) == EXIT_OK
    shown = capsys.readouterr().out
    assert f"model  {state_dict}\nrun    {out}, text, made by torch\n" in shown
    assert main(["generate", str(out), "--length", "5", "--prompt", "ab"]) == EXIT_OK
    assert set(capsys.readouterr().out.strip()) <= set("ab cd")


def test_json(safetensors, tmp_path, capsys):
    out = tmp_path / "run"
    arguments = ["import", str(safetensors), "--chars", "ab cd", "--out", str(out), "--json"]
    assert main(arguments) == EXIT_OK
    facts = json.loads(capsys.readouterr().out)
    assert (facts["kind"], facts["made_by"], facts["run"]) == ("text", "torch", str(out))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give one of `--text` (the text it was trained on), `--chars`"),
        (["--chars", "ab"], "`--chars` has 2 characters, the model has 5 tokens"),
        (["--text", "missing.txt"], "missing.txt"),
        (["--vocab", "missing.json"], "missing.json is no JSON file"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(arguments, said, safetensors, tmp_path, capsys):
    code = main(["import", str(safetensors), "--out", str(tmp_path / "run"), *arguments])
    error = capsys.readouterr().err
    assert code == EXIT_USAGE
    assert said in error
    assert error.count("\n") == 1


def test_damaged_file(state_dict, tmp_path, capsys):
    state_dict.write_bytes(state_dict.read_bytes()[:400])
    assert main(["import", str(state_dict), "--out", str(tmp_path / "run")]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert str(state_dict) in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()
