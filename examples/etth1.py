# %% [markdown]
# Electricity transformer temperatures: forecast seven variables 96 hours ahead.
#
#     python examples/etth1.py ETTh1.csv          # from https://github.com/zhouhaoyi/ETDataset
#
# Cells begin with `# %%`: editors that know notebooks run them one by one.

# %% The table: hourly rows, a time and seven numbers; everything is checked and said aloud.
import sys

from fastlstm import Forecaster

path = sys.argv[1] if len(sys.argv) > 1 else "ETTh1.csv"
DAY = 24
months = [12 * 30 * DAY, 4 * 30 * DAY, 4 * 30 * DAY]  # training, validation, test

# %% Training: the weights kept are those best on the validation months.
model = Forecaster(
    horizon=96,
    split=months,
    budget="60s",
    observers=[
        lambda event: (
            print(f"  step {event['step']:4}: validation loss {event['loss']:.4f}")
            if event["event"] == "eval"
            else None
        )
    ],
).fit(path)
done = model.fitted_
print(f"{done.steps} steps in {done.seconds:.0f} s, best after step {done.best_step}")
print(f"waiting for windows: {done.input_wait_share:.2%}")

# %% Judged from every hour of the test months, beside the last value and the last day repeated.
for name, scores in model.backtest(scaled=True).items():
    print(f"{name:15}", "  ".join(f"{key} {value:.3f}" for key, value in scores.items()))

# %% The hours after the end of the table, with 80 % intervals.
print(model.predict_quantiles(quantiles=(0.1, 0.5, 0.9))[:3])

# %% Kept and opened again; `fastlstm forecast runs/etth1 ETTh1.csv --out pred.csv` does the same.
model.save("runs/etth1")
print(len(Forecaster.load("runs/etth1").predict(path)), "rows from the files")
