"""What a run has recorded, for other tools: files are read, torch is not needed."""
