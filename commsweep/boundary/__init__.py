"""A boundary between two stages: both channels around one crossing, put into a model by hooks."""
