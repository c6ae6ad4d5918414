"""Data parallelism: simulated learners whose weight gradients are compressed, and the same as real processes."""
