"""What a user types: the `commsweep` command and its benchmarks."""
