"""Text data: sources, vocabularies, the encoded cache and batches."""
