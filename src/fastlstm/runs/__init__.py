"""Run directories: their files, and how each is written whole."""
