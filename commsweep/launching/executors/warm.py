"""The imports of the server that workers are forked from, made once."""

from commsweep.child import end_with_launcher
from commsweep.lean_imports import loading

end_with_launcher()  # before the imports, which take seconds

with loading():
    import commsweep.training.run  # noqa: F401
