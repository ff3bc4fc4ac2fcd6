"""Functional operations: check the arguments, choose a backend, call it."""
