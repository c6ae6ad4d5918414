"""Which runs exist, and who executes them."""
