"""Run directories: what is in them, and how it gets there whole."""
