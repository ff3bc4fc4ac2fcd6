"""What every kind of training shares: session, checkpoints, optimizers, schedule, precision."""
