"""From a grid of Runs to outcomes: plans, executors, searches, views."""
