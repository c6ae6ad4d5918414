"""Engines that execute cells: one module each, with `run(job) -> Launched`."""
