"""Data parallelism: learners whose weight gradients are compressed and exchanged."""
