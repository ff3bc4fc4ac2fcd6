"""Models in and out: files of other frameworks read, models written for other runtimes."""
