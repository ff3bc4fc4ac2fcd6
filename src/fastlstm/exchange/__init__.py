"""Models from other frameworks come in, ours go out."""
