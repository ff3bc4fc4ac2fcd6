"""One file per implementation of the sequence op; `ops.dispatch` orders them."""
