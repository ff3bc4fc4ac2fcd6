# %% Part of examples/workflow.sh, which keeps what a step printed in STEP.json: its command
# (`command STEP`), and the table of what all steps gained (`table SECONDS`).
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


def row(step, what, measured, before, after):
    gain = f"{after - before:+.3f}" if "bits" in measured else f"{after / before:.2f}x"
    return step, what, measured, figure(before), figure(after), gain


def training(seconds):
    models = {"tutorial": ("", "")}
    if found := recommended():
        options = ", ".join(f"{name} {value}" for name, value in found[0]["options"].items())
        predicted = f"{found[0]['gain']:+.0%} predicted"
        what = options or found[0]["cause"]  # an instruction set is no option
        models["profiled"] = "profile", f"{what} ({predicted})".replace("_", " ")
    else:
        yield "profile", "recommends nothing", "", "", "", ""
    best = "{rnn_size} units, batch {batch_size}, {optimizer}"
    models["tuned"] = "tune", best.format(**answer("tune")["best"]["options"])
    speeds = [run["units_per_s"] for run in answer("compare")["runs"]]
    for (old, new), (slow, fast) in zip(pairwise(models), pairwise(speeds), strict=True):
        yield row(*models[new], f"bits/char after {seconds} s", bits(old), bits(new))
        yield row("", "", "tokens/s trained", slow, fast)


def using():
    old, new = (answer("compress")[side] for side in ("source", "result"))
    yield row("compress", new["weights"], "bytes", old["file_bytes"], new["file_bytes"])
    yield row("", "", "characters/s written", old["speed"]["1"], new["speed"]["1"])
    yield row("", "", "bits/char", bits("tuned"), bits("compressed"))
    proof, served = answer("export")["proof"], answer("serve")
    error = figure(proof["max_error"])
    yield "export", "ONNX", "largest error", "", error, f"limit {proof['limit']}"
    what = f"{served['clients']} clients instead of 1"
    yield row("serve", what, "characters/s read", served["one"], served["together"])
    runs, size = Path("monitor.json").read_text().split()[-2], Path("page.html").stat().st_size
    yield "monitor", f"{runs} runs on one page", "bytes", "", figure(size), ""
    yield row("in all", "", "bits/char", bits("tutorial"), bits("compressed"))


# %% Figures of a busy machine say little.
def notes():
    for name in (run["run"] for run in answer("compare")["runs"]):
        lines = Path(name, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        shares = [event.get("others_share") or 0.0 for event in map(json.loads, lines)]
        if (share := max(shares)) > 0.2:
            yield f"others used up to {share:.0%} of the cores while {name} trained"


# %% tune prints one command; profile one for every recommendation, the best first, or none.
if sys.argv[1] == "command":
    found = recommended() if sys.argv[2] == "profile" else [answer(sys.argv[2])]
    print(found[0]["command"] if found else "")
else:
    heads = "step", "what it did", "measured", "before", "after", "gain"
    for cells in [heads, *training(sys.argv[2]), *using()]:
        print("{:<10}{:<34}{:<21}{:>11}{:>11}{:>13}".format(*cells).rstrip())
    sys.stdout.writelines(f"note: {note}\n" for note in notes())
