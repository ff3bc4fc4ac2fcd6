"""A text model made smaller without training: an output of lower rank, another format."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fastlstm.compression.low_rank import with_output_rank
from fastlstm.compression.options import CompressConfig
from fastlstm.compression.text_model import TextModel, encode_model
from fastlstm.text.config import ModelConfig


class CompressedModel(NamedTuple):
    """A result of compressing, as it is stored.

    Attributes:
        data: its file of weights.
        config: its sizes.
        weight_format: of the file.
        methods: what was done, in words.
    """

    data: bytes
    config: ModelConfig
    weight_format: str
    methods: list[str]

    def loaded(self, path: Path) -> TextModel:
        """Returns the model as its file in `path` will give it back."""
        return TextModel.of_file(self.data, path, self.config, self.weight_format)


def rounded_model(source: TextModel, config: CompressConfig) -> CompressedModel:
    """Returns the source with the rank and the format that a compression asks for."""
    weights, sizes, methods = source.weights, source.config, list[str]()
    if (rank := config.output_rank) is not None:
        weights, sizes = with_output_rank(weights, sizes, rank)
        methods.append(output_method(source.config, sizes))
    if config.to != "fp32":
        methods.append(f"{config.to}, rounded to the nearest")
    return CompressedModel(encode_model(weights, config.to), sizes, config.to, methods)


def output_method(source: ModelConfig, result: ModelConfig) -> str:
    """Describes an output of lower rank."""
    return f"output of rank {result.output_rank} instead of {source.output_width}"
