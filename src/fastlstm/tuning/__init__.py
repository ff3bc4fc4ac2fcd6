"""Whether one thing is faster than another, measured on a machine that does other work too."""
