from pathlib import Path

from reference import reference

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_reference_has_not_drifted():
    told = "run: python docs/reference.py > docs/cli.md"
    assert DOCS.read_text(encoding="utf-8") == reference(), told


def test_the_reference_names_every_flag_once_per_command():
    text = reference()
    train = text[text.index("## fastlstm train") : text.index("## fastlstm tune")]
    assert train.count("`--rnn-size N`") == 1
    assert "| `--[no-]tensorboard` | write TensorBoard event files [on] |" in train
    assert "| `--vocab {char,byte,bpe}` |" in train
