# %% [markdown]
# Callbacks: your own code at fixed places of a run, the same for texts and for tables.
#
#     python examples/callbacks.py book.txt ETTh1.csv runs
#
# Cells begin with `# %%`: editors that know notebooks run them one by one.

# %% The text, the table, and where the runs are kept.
import sys

import fastlstm

text, table, runs = sys.argv[1:] if len(sys.argv) == 4 else ("book.txt", "ETTh1.csv", "runs")


# %% A callback that ends a run; the run is evaluated, saved and published as at any other end.
class StopAtLoss(fastlstm.Callback):
    """Ends training when the validation loss has reached a goal."""

    def __init__(self, goal):
        self.goal = goal

    def on_evaluate(self, trainer, metrics):
        if metrics["loss"] <= self.goal:
            trainer.end(f"validation loss {self.goal} reached")


# %% A callback that adds a figure to every evaluation: observers and metrics.jsonl have it.
class LargestGradient(fastlstm.Callback):
    """Adds the largest entry of a gradient since the evaluation before, ahead of clipping."""

    def __init__(self):
        self.largest = 0.0

    def on_gradients(self, trainer):
        for parameter in trainer.model.parameters():
            self.largest = max(self.largest, float(parameter.grad.abs().max()))

    def on_evaluate(self, trainer, metrics):
        largest, self.largest = self.largest, 0.0
        return {"largest_gradient": largest}

    def state_dict(self):  # kept in every checkpoint: a resumed run continues with it
        return {"largest": self.largest}

    def load_state_dict(self, state):
        self.largest = state["largest"]


def show(event):
    """An observer: a function that only reads events."""
    if event["event"] == "eval":
        print(f"  step {event['step']}: loss {event['loss']:.3f}, {event['largest_gradient']:.2g}")
    if event["event"] == "end":
        print(f"  {event['reason']}")


# %% A language model.
print("text")
fastlstm.train(
    text, out=f"{runs}/text", steps=60, eval_every=20, rnn_size=64, embed_size=32, vocab="byte",
    callbacks=[StopAtLoss(2.5), LargestGradient()], observers=[show],
)  # fmt: skip

# %% A forecaster. The same call with resume=True continues a run that was stopped.
print("table")
fastlstm.Forecaster(
    horizon=24, input_size=96, hidden_size=32, steps=60, evaluations=3,
    callbacks=[StopAtLoss(0.5), LargestGradient()], observers=[show],
).fit(table, out=f"{runs}/table")  # fmt: skip
