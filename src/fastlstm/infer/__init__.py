"""Text from a trained model: sampling, fast decoding and the `LM` class."""
