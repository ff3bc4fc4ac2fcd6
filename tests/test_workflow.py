"""examples/workflow.sh on answers of the real verbs; those that take a minute are recorded."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fastlstm
from fastlstm.cli.main import main
from fastlstm.text import weight_report
from fastlstm.tuning.verdicts import Verdict

WORKFLOW = Path(__file__).parents[1] / "examples" / "workflow.sh"
SOURCE = "the book's text.txt"
STUB = f"""#!/bin/sh
# fastlstm, but runs and answers that take long are there already.
prepared=$(dirname "$0")
for word; do printf '%s\\t' "$word"; done >>"$prepared/calls"
echo >>"$prepared/calls"
if [ "$1" = "$(cat "$prepared/broken")" ]; then
    echo half an answer
    echo "fastlstm: error: it is broken" >&2
    exit 2
fi
case $1 in
train) for out; do :; done; mkdir -p "$(dirname "$out")"; cp -R "$prepared/run" "$out" ;;
compress) cp -R "$prepared/compressed" compressed ;;
esac
case $1 in
train) ;;
profile | tune | evaluate | compress | export) cat "$prepared/$1.json" ;;
*) exec '{sys.executable}' -m fastlstm "$@" ;;
esac
"""


def verdict(gain, command, **options):
    found = Verdict("threads", 0.4, gain, gain / 2, 2 * gain, "exact", options)
    return {**found.to_dict(), "command": command}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A directory with `fastlstm` for PATH, a run, its compressed form, and answers."""
    folder = tmp_path_factory.mktemp("workflow")
    source = folder / SOURCE
    source.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    run, compressed = folder / "run", folder / "compressed"
    fastlstm.train(source, out=run, steps=3, preset="tiny", threads=1, precision="fp32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_report, "_SPEED_S", 0.01)
        for words in (
            ["evaluate", str(run), str(source), "--split", "test"],
            ["compress", str(run), "--to", "int8", "--out", str(compressed)],
            ["export", str(compressed), "--to", "onnx", "--out", str(folder / "exported")],
        ):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                assert main([*words, "--json"]) == 0
            (folder / f"{words[0]}.json").write_text(printed.getvalue())
    stub = folder / "fastlstm"
    stub.write_text(STUB)
    stub.chmod(0o755)
    return folder


class Workflow:
    """The example in a directory of its own.

    Args:
        prepared: copied; tests change its answers.
        folder: to start the example in.
    """

    def __init__(self, prepared, folder):
        self.folder, self.bin = folder, folder / "bin"
        shutil.copytree(prepared, self.bin)
        shutil.copy(prepared / SOURCE, folder)
        self.source = str(folder / SOURCE)
        (self.bin / "broken").write_text("nothing\n")
        train = ["fastlstm", "train", self.source]
        threads = shlex.join([*train, "--threads", "2", "--out", "profiled"])
        self.answers("profile", verdicts=[verdict(0.8, threads, threads=2), verdict(0.01, "no")])
        tuned = {"rnn_size": 384, "batch_size": 16, "optimizer": "muon"}
        command = shlex.join([*train, "--rnn-size", "384", "--out", "runs/the book's text"])
        self.answers("tune", best={"options": tuned}, command=command)

    def answers(self, verb, **value):
        (self.bin / f"{verb}.json").write_text(json.dumps(value))

    def run(self, *arguments):
        path = os.pathsep.join([str(self.bin), os.path.dirname(sys.executable), os.defpath])
        return subprocess.run(
            ["sh", str(WORKFLOW), *arguments], cwd=self.folder, capture_output=True, text=True,
            check=False, env={**os.environ, "PATH": path},
        )  # fmt: skip

    @property
    def calls(self):
        lines = (self.bin / "calls").read_text().splitlines()
        return [line.split("\t")[:-1] for line in lines]


@pytest.fixture
def workflow(prepared, tmp_path):
    return Workflow(prepared, tmp_path)


def test_every_step_runs_and_its_gain_is_in_the_table(workflow):
    done = workflow.run(SOURCE, "7")
    assert done.returncode == 0, done.stderr
    verbs = [call[0] for call in workflow.calls]
    assert verbs == [
        *("train", "profile", "train", "tune", "train", "compare", "compress"),
        *("evaluate",) * 4, "export", "serve", "monitor",
    ]  # fmt: skip
    assert workflow.calls[2] == ["train", workflow.source, "--threads", "2", "--out", "profiled"]
    lines = [line for line in done.stdout.splitlines() if not line.startswith("note: ")]
    heads, *rows = (re.split(r"\s{2,}", line) for line in lines)
    assert heads == ["step", "what it did", "measured", "before", "after", "gain"]
    steps = [row[0] for row in rows if row[0]]
    assert steps == [*("profile", "tune", "compress", "export", "serve", "monitor", "in all")]
    table = {row[0]: row for row in rows if row[0]}
    assert table["profile"][1:3] == ["threads 2 (+80% predicted)", "bits/char after 7 s"]
    assert table["tune"][1] == "384 units, batch 16, muon"
    answer = json.loads((workflow.bin / "compress.json").read_text().splitlines()[-1])
    before, after = (answer[side]["file_bytes"] for side in ("source", "result"))
    assert table["compress"][3:] == [f"{before:,}", f"{after:,}", f"{after / before:.2f}x"]
    assert table["export"][-1] == "limit 1e-05"
    assert all(float(number.replace(",", "")) > 0 for number in table["serve"][3:5])
    assert table["monitor"][1] == "3 runs on one page"
    (page,) = workflow.folder.glob("workflow-*/page.html")
    assert "tutorial" in page.read_text(encoding="utf-8")


def test_a_healthy_run_and_a_busy_machine_are_named(workflow):
    workflow.answers("profile", verdicts=[verdict(0.01, "no", threads=2)])
    with (workflow.bin / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"event":"machine","others_share":0.91}\n')
    done = workflow.run(SOURCE, "7")
    assert done.returncode == 0, done.stderr
    assert [call[0] for call in workflow.calls].count("train") == 2
    assert "profile   recommends nothing\n" in done.stdout
    assert "note: others used up to 91% of the cores while tuned trained\n" in done.stdout


@pytest.mark.parametrize(
    ("verb", "step"), [("train", "tutorial"), ("tune", "tune"), ("serve", "serve")]
)
def test_a_step_that_fails_ends_it_without_a_table(workflow, verb, step):
    (workflow.bin / "broken").write_text(f"{verb}\n")
    done = workflow.run(SOURCE, "7")
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"workflow: step '{step}' failed with exit code ")
    assert last.endswith(": fastlstm: error: it is broken")
    assert workflow.calls[-1][0] == verb


def test_an_answer_without_a_command_is_named(workflow):
    workflow.answers("tune", best={"options": {}})
    done = workflow.run(SOURCE)
    assert (done.returncode, done.stdout) == (1, "")
    assert "workflow: step 'tune' printed no command: KeyError: 'command'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((SOURCE, "1m"), "SECONDS is '1m', expected a whole number such as 60"),
        ((SOURCE, "60", "x"), "it takes a SOURCE and SECONDS, 3 arguments came"),
    ],
)
def test_bad_usage(workflow, arguments, said):
    done = workflow.run(*arguments)
    assert (done.returncode, done.stderr) == (2, f"workflow: {said}\n")
    assert not list(workflow.folder.glob("workflow-*"))


def test_fastlstm_must_be_on_path(workflow):
    tools = workflow.folder / "tools"
    tools.mkdir()
    for name in ("sh", "dirname"):
        (tools / name).symlink_to(shutil.which(name) or name)
    done = subprocess.run(
        [str(tools / "sh"), str(WORKFLOW)], cwd=workflow.folder, env={"PATH": str(tools)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == ("workflow: there is no fastlstm on PATH; activate its environment\n")
