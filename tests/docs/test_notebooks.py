"""The notebooks run, and their stored outputs are of this code; what a kernel shows and keeps."""

import re

import nbformat
import pytest
from jupyter_client import KernelManager

from execute import NOTEBOOKS, executed

_MOST_BYTES = 200_000
_TRAIN = """
import os, signal, fastlstm
def step(event):
    if event["event"] == "step":
        print("step", event["step"], flush=True)
def train(out="run", **options):
    return fastlstm.train("fox.txt", out=out, preset="tiny", log_every=1, **options)
size = open("fox.txt", "w").write("the quick brown fox jumps over the lazy dog\\n" * 400)
"""


def shown(cell):
    """Returns the kinds of a cell's outputs, each as the best that a notebook shows."""
    outputs = cell.get("outputs", [])
    return [str(next(iter(sorted(o.data))) if "data" in o else o.output_type) for o in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_is_stored(path, tmp_path):
    stored, made = nbformat.read(path, as_version=4), executed(path, tmp_path)
    assert [shown(cell) for cell in made.cells] == [shown(cell) for cell in stored.cells], (
        "run `make notebooks` after a change"
    )
    text = path.read_text(encoding="utf-8")
    assert len(text) < _MOST_BYTES
    assert not re.findall(r"/(?:home|root|tmp|work|Users)/\w+", text)
    assert '"stderr"' not in text


class Kernel:
    """A kernel and the messages of the code that it runs."""

    def __init__(self, folder):
        self.manager = KernelManager()
        self.manager.start_kernel(cwd=str(folder))
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def messages(self, code):
        """Yields content and kind of each message until the kernel is idle."""
        asked = self.client.execute(code)
        while True:
            message = self.client.get_iopub_msg(timeout=60)
            if message["parent_header"].get("msg_id") != asked:
                continue
            content = {"kind": message["msg_type"], **message["content"]}
            if content.get("execution_state") == "idle":
                return
            yield content

    def run(self, code):
        """Returns what code printed, and the class and message of its error."""
        printed, error = "", ""
        for message in self.messages(code):
            printed += message.get("text", "")
            if message["kind"] == "error":
                error = f"{message['ename']}: {message['evalue']}"
        return printed, error


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernel")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        patch.delenv("PYTEST_CURRENT_TEST")  # else ipykernel does not show what handlers write
        kernel = Kernel(folder)
    assert kernel.run(_TRAIN) == ("", "")
    yield kernel
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)


def test_training_shows_a_bar_that_changes_in_place(kernel):
    code = "import numpy as np; model = fastlstm.Forecaster(2, steps=40, input_size=8, log_every=1)"
    for call in ("model.fit(np.sin(np.arange(400)))", "train(steps=3, out='shown')"):
        found = list(kernel.messages(f"{code}\n{call}"))
        (bar,) = [m for m in found if m["kind"] == "display_data"]
        changes = [m for m in found if m["kind"] == "update_display_data"]
        lines = [m["data"]["text/plain"] for m in [bar, *changes]]
        assert any("%" in line for line in lines), call
        assert lines[-1].startswith("40 steps, " if "fit" in call else "3 steps, "), call
        assert {m["transient"]["display_id"] for m in [bar, *changes]} == {
            bar["transient"]["display_id"]
        }
        (result,) = [m for m in found if m["kind"] == "execute_result"]
        assert "<table>" in result["data"]["text/html"]
        assert not [m for m in found if m["kind"] == "error"]


def test_an_interrupt_saves_the_run(kernel):
    printed, error, is_interrupted = "", "", False
    for message in kernel.messages("train(epochs=1000, observers=[step])"):
        printed += message.get("text", "")
        if "step 3" in printed and not is_interrupted:
            kernel.manager.interrupt_kernel()
            is_interrupted = True
        if message["kind"] == "error":
            error = f"{message['ename']}: {message['evalue']}"
    assert error.startswith("Stopped: stopped by SIGINT; checkpoint-"), error
    assert "`resume=True`" in error
    assert "SIGINT: saving, then stopping" in printed
    steps = int(error.partition("checkpoint-")[2].split()[0])
    printed, error = kernel.run(
        f"run = train(epochs=None, steps={steps + 2}, resume=True, observers=[step])"
    )
    assert (printed.split()[:2], error) == (["step", str(steps + 1)], "")
    printed, error = kernel.run("print(len(fastlstm.LM.load(run).generate(max_tokens=5)))")
    assert (printed, error) == ("5\n", "")


def test_a_second_interrupt_ends_the_cell_and_not_the_kernel(kernel):
    code = """
def interrupt(event):
    if event["event"] == "step":
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
kept = 7
train(epochs=1000, out="twice", observers=[interrupt])
"""
    assert kernel.run(code)[1].startswith("KeyboardInterrupt")
    assert kernel.run("print(kept)") == ("7\n", "")


def test_an_interrupt_of_a_fit_without_a_directory_leaves_the_forecaster_as_it_was(kernel):
    code = """
def interrupt(event):
    if event["event"] == "step":
        os.kill(os.getpid(), signal.SIGINT)
model = fastlstm.Forecaster(2, epochs=1000, input_size=8, log_every=1, observers=[interrupt])
model.fit(np.sin(np.arange(400)))
"""
    assert kernel.run(f"import numpy as np{code}")[1].startswith("KeyboardInterrupt")
    assert kernel.run("model.predict()")[1].endswith("not fitted yet; call fit first")
