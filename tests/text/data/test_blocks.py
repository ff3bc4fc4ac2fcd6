"""Clean blocks: the simple definition holds whatever the block size cuts through."""
