"""Training one model in several processes, by torch.distributed."""
