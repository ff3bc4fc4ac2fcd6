import json

import pytest
import torch
from safetensors.torch import save_file


@pytest.fixture
def state_dict(tmp_path):
    """A text model of 5 tokens as torch saves its weights."""
    layers = {"lstm": torch.nn.LSTM(4, 6), "out": torch.nn.Linear(6, 5)}
    model = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(5, 4), **layers})
    path = tmp_path / "m.pt"
    torch.save(model.state_dict(), path)
    return path


@pytest.fixture
def safetensors(state_dict):
    """The same in a file that no other process needs to read."""
    path = state_dict.with_suffix(".safetensors")
    save_file(torch.load(state_dict), path)
    return path


def test_imported_run_writes_text(state_dict, tmp_path, printed):
    out = tmp_path / "run"
    shown = printed("import", state_dict, "--chars", "ab cd", "--out", out)
    assert f"model  {state_dict}\nrun    {out}, text, made by torch\n" in shown
    assert set(printed("generate", out, "--length", "5", "--prompt", "ab").strip()) <= set("ab cd")


def test_json(safetensors, tmp_path, printed):
    out = tmp_path / "run"
    arguments = [safetensors, "--chars", "ab cd", "--out", out, "--json"]
    facts = json.loads(printed("import", *arguments))
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
def test_errors_are_one_line_and_exit_code_2(arguments, said, safetensors, tmp_path, refused):
    assert said in refused("import", safetensors, "--out", tmp_path / "run", *arguments)


def test_damaged_file(state_dict, tmp_path, refused):
    state_dict.write_bytes(state_dict.read_bytes()[:400])
    assert str(state_dict) in refused("import", state_dict, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()
