"""What the runs say. Pure functions of files: no torch, no account, no network."""
