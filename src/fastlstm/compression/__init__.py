"""Makes trained models smaller and faster: formats of the weights, pruning, distillation."""
