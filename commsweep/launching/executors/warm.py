"""The imports of the server that workers are forked from, made once."""

from commsweep.lean_imports import loading

with loading():
    import commsweep.training.run  # noqa: F401
