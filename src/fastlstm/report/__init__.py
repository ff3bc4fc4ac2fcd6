"""What a run shows: progress on the screen while it runs, report.html afterwards."""
