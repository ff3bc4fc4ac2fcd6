"""Training one model in several processes: ranks, shards of a batch, sums that keep their order."""
