# %% [markdown]
# A callback: prune the recurrent weights while a language model trains on them.
#
#     python examples/callback.py book.txt
#
# After each step the smallest recurrent weights are set to zero: few at first, 75 % from the middle
# of the run on (Zhu & Gupta 2017). The share of zeros appears beside the losses on the screen, in
# metrics.jsonl and in report.html. `fastlstm.Callback` lists the other places to hook into.

# %% The callback.
import sys

import torch

import fastlstm


class Prune(fastlstm.Callback):
    """Sets the smallest recurrent weights to zero.

    Args:
        share: of the weights that are zero from the middle of the run on.
    """

    def __init__(self, share: float) -> None:
        self.share = share

    def on_update(self, trainer):
        share = self.share * min(1.0, 2 * trainer.done())
        for weight in recurrent_weights(trainer.model):
            smallest = round(share * weight.numel())
            if smallest:
                threshold = weight.abs().flatten().kthvalue(smallest).values
                weight.masked_fill_(weight.abs() <= threshold, 0.0)

    def on_evaluate(self, trainer, metrics):
        zeros = [(weight == 0).float().mean() for weight in recurrent_weights(trainer.model)]
        return {"zeros": float(torch.stack(zeros).mean())}


def recurrent_weights(model):
    return [weight.detach() for name, weight in model.named_parameters() if "weight_hh" in name]


# %% Training with it.
source = sys.argv[1] if len(sys.argv) > 1 else "python-docs"
run = fastlstm.train(
    source, out="runs/pruned", preset="tiny", budget="60s", callbacks=[Prune(0.75)]
)
print(f"{run.bits_per_char:.3f} bits/char")

# %% The weights that are kept are pruned, too.
lm = fastlstm.LM.load(run)
(weight, *_) = recurrent_weights(lm.model)
print(f"{float((weight == 0).float().mean()):.0%} zeros")
print(lm.generate("", 100))
