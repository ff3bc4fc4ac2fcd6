"""Tables of time series: read once, mapped from disk, cut into windows that are never stored."""
