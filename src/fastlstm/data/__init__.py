"""Text data: sources, vocabularies, the encoded cache, batches and prefetch."""
