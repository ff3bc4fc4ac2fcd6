"""The network of a forecaster."""
