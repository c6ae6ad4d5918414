"""Executes a Run and records a row."""
