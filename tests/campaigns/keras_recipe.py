"""A text model that Keras trained: imported, scored, trained on, compressed, exported.

The model is saved by a Keras recipe for characters: Embedding -> LSTM -> softmax on windows of 100;
it trains on the first 90 % of TEXT, and the next 5 % are scored here. Its own score is printed by
the recipe.

usage: python tests/campaigns/keras_recipe.py MODEL.keras TEXT [--budget 60s] [--window 100]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import fastlstm
from fastlstm.text.evaluation import evaluate


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--budget", default="60s")
    parser.add_argument("--window", type=int, default=100)
    asked = parser.parse_args()
    text = Path(asked.text).read_text(encoding="utf-8-sig").replace("\r\n", "\n")
    train, valid = text[: int(0.9 * len(text))], text[int(0.9 * len(text)) : int(0.95 * len(text))]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part, content in (("all", text), ("train", train), ("valid", valid)):
            (folder / f"{part}.txt").write_text(content, encoding="utf-8")
        run = fastlstm.import_run(asked.model, out=folder / "run", text=str(folder / "all.txt"))
        print(f"imported {run.made_by}: {'; '.join(run.notes)}")
        fastlstm.train(
            folder / "train.txt", start=run, out=folder / "on", budget=asked.budget,
            valid=str(folder / "valid.txt"), sample_every=0, observers=(),
        )  # fmt: skip
        report = fastlstm.compress(
            folder / "on", out=folder / "int8", to="int8", data=str(folder / "valid.txt"),
            observers=(),
        )  # fmt: skip
        exported = fastlstm.export(
            folder / "on", to="litert", out=folder / "litert", check_text=str(folder / "valid.txt")
        )
        rows = {"imported": folder / "run", f"trained on for {asked.budget}": folder / "on"}
        print(f"\n{'':24}{'window ' + str(asked.window):>12}{'carried':>10}  bits/char")
        for label, path in rows.items():
            scores = _scores(path, valid, asked.window)
            print(f"{label:24}{scores[0]:12.4f}{scores[1]:10.4f}")
        int8 = fastlstm.LM.load(folder / "int8")
        print(f"{'int8':24}{'':12}{int8.evaluate(valid).bits_per_char:10.4f}")
        print(f"\nint8: {report.result.file_bytes} bytes of {report.source.file_bytes}")
        assert exported.proof is not None
        error = exported.proof.max_error
        print(f"LiteRT: {exported.num_bytes} bytes, largest error {error:.1e} in its interpreter")


def _scores(path: Path, text: str, window: int) -> tuple[float, float]:
    """Returns bits per character from zero states at windows, and with the state carried on."""
    lm = fastlstm.LM.load(path)
    ids = lm.tokenizer.encode(text)
    at_windows = evaluate(lm.model, ids, lm.tokenizer, zero_state_window=window)
    carried = evaluate(lm.model, ids, lm.tokenizer)
    return at_windows.bits_per_char, carried.bits_per_char


if __name__ == "__main__":
    main()
