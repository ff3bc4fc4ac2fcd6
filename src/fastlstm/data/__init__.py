"""Text data: sources, vocabularies, the encoded cache, batches and prefetch."""

from __future__ import annotations

from fastlstm.data.lanes import Batch, Batches, LaneBatches, WindowBatches, largest_batch_size
from fastlstm.data.loader import Prefetcher
from fastlstm.data.sources import Source, open_source, text_source
from fastlstm.data.text import Splits, TextDataset, prepare_text, token_counts
from fastlstm.data.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    StreamDecoder,
    Tokenizer,
    load_tokenizer,
)

__all__ = [
    "Batch",
    "Batches",
    "ByteTokenizer",
    "CharTokenizer",
    "LaneBatches",
    "Prefetcher",
    "Source",
    "Splits",
    "StreamDecoder",
    "TextDataset",
    "Tokenizer",
    "WindowBatches",
    "largest_batch_size",
    "load_tokenizer",
    "open_source",
    "prepare_text",
    "text_source",
    "token_counts",
]
