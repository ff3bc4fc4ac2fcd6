"""report.html: what a run did, in one file that opens offline."""
