"""Modules: the language model, its initial weights, its loss and its evaluation."""
