"""Run directories watched while they grow: files only, no torch."""
