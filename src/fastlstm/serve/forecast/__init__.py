"""The Open Inference Protocol, and the engine behind it."""
