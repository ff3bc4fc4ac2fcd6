"""Language models: data, training, writing."""
