"""Hardware, files, caches, checked options and prefetch; no torch on import."""
