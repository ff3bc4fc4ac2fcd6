# %% [markdown]
# Part of examples/workflow.sh: the command that a step printed (`command STEP`), and the table of
# what all steps gained (`table SECONDS`). What a step printed is in STEP.json.

import json
import sys
from itertools import pairwise
from pathlib import Path


def answer(step):
    return json.loads(Path(f"{step}.json").read_text(encoding="utf-8").splitlines()[-1])


def bits(model):
    return answer(f"test-{model}")["bits_per_char"]


def recommended():
    return [v for v in answer("profile")["verdicts"] if v["is_recommended"] and v["command"]]


# %% Rows of the table: step, what it did, what was measured, before, after, and the gain.
def figure(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3f}" if value >= 0.01 else f"{value:.1e}"


def change(step, what, measured, before, after):
    return step, what, measured, figure(before), figure(after), f"{after - before:+.3f}"


def ratio(step, what, measured, before, after):
    return step, what, measured, figure(before), figure(after), f"{after / before:.2f}x"


def training(seconds):
    models = {"tutorial": ("", "")}
    if found := recommended():
        options = ", ".join(f"{name} {value}" for name, value in found[0]["options"].items())
        predicted = f"{found[0]['gain']:+.0%} predicted"
        models["profiled"] = "profile", f"{options} ({predicted})".replace("_", " ")
    else:
        yield "profile", "recommends nothing", "", "", "", ""
    best = "{rnn_size} units, batch {batch_size}, {optimizer}"
    models["tuned"] = "tune", best.format(**answer("tune")["best"]["options"])
    speeds = [run["units_per_s"] for run in answer("compare")["runs"]]
    for (old, new), (slow, fast) in zip(pairwise(models), pairwise(speeds), strict=True):
        yield change(*models[new], f"bits/char after {seconds} s", bits(old), bits(new))
        yield ratio("", "", "tokens/s trained", slow, fast)


def using():
    old, new = answer("compress")["source"], answer("compress")["result"]
    yield ratio("compress", new["weights"], "bytes", old["file_bytes"], new["file_bytes"])
    yield ratio("", "", "characters/s written", old["speed"]["1"], new["speed"]["1"])
    yield change("", "", "bits/char", bits("tuned"), bits("compressed"))
    proof, served = answer("export")["proof"], answer("serve")
    error, limit = figure(proof["max_error"]), f"limit {proof['limit']:.0e}"
    yield "export", "ONNX", "largest error", "", error, limit
    clients = f"{served['clients']} clients instead of 1"
    yield ratio("serve", clients, "characters/s read", served["one"], served["together"])
    runs = Path("monitor.json").read_text(encoding="utf-8").split(": ")[-1].strip()
    size = figure(Path("page.html").stat().st_size)
    yield "monitor", f"{runs} on one page", "bytes", "", size, ""
    yield change("in all", "", "bits/char", bits("tutorial"), bits("compressed"))


# %% tune prints one command; profile one for every recommendation, the best first, or none.
if sys.argv[1] == "command":
    found = recommended() if sys.argv[2] == "profile" else [answer(sys.argv[2])]
    print(found[0]["command"] if found else "")
else:  # the table is complete before any of it is printed
    heads = "step", "what it did", "measured", "before", "after", "gain"
    table = [heads, *training(sys.argv[2]), *using()]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    aligned = ["<"] * 3 + [">"] * 3
    for row in table:
        cells = zip(row, aligned, widths, strict=True)
        print("  ".join(f"{cell:{side}{width}}" for cell, side, width in cells).rstrip())
