"""Sweeps: grids of runs, and plans of measurements."""
