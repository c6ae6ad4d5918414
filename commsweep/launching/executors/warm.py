"""What the server that workers are forked from imports once."""

from commsweep.startup import loading

with loading():
    import commsweep.training.run  # noqa: F401
