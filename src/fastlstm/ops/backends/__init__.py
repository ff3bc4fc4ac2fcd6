"""One file per implementation of the sequence op; `ops.registry` orders them."""
