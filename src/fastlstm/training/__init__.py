"""Training: the loop, optimizers, precision, checkpoints and metrics."""
