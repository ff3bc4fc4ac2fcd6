"""examples/phone.py writes an exported model's text without fastlstm and without torch."""

import subprocess
import sys
from pathlib import Path

import fastlstm

PHONE = Path(__file__).parents[2] / "examples" / "phone.py"
WITHOUT = """
import runpy, sys
for name in ("fastlstm", "torch", "tensorflow"):
    sys.modules[name] = None
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def written_by(*arguments):
    code = f"import sys; sys.argv = {[str(PHONE), *arguments]}\n{WITHOUT}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_likeliest_text_is_that_of_the_run(text_run, tmp_path):
    run, out = text_run(num_layers=2), tmp_path / "out"
    fastlstm.export(run, to="litert", out=out)
    done = written_by(str(out), "the quick", "50", "0")
    assert done.returncode == 0, done.stderr
    expected = fastlstm.LM.load(run).generate("the quick", 50, temperature=0)
    assert done.stdout.removesuffix("\n") == f"the quick{expected}"
    assert "tokens/s on one thread" in done.stderr


def test_unknown_layers_of_the_model_are_named(text_run, tmp_path):
    fastlstm.export(text_run(), to="litert", out=tmp_path / "out")
    done = written_by(str(tmp_path / "out"), "Zoé", "5")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "the model does not know ['Z', 'é']"
    done = written_by(str(tmp_path / "out"), "", "5")
    assert done.stderr.splitlines()[-1] == "the prompt is empty"
