"""Completions: requests for text, and the engine behind them."""
