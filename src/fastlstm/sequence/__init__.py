"""A number or a class for each sequence."""
