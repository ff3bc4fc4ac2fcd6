"""Tables of time series: read once, mapped from disk, cut into windows that are never stored."""

from fastlstm.errors import MissingExtraError

try:
    import pyarrow  # noqa: F401
except ImportError as error:
    raise MissingExtraError(
        "tables are read by pyarrow, which is not installed: pip install 'fastlstm[series]'"
    ) from error
