"""The records of settings. No torch here: plans, stores and analysis read them."""

from commsweep.config.execution import Execution
from commsweep.config.override import override
from commsweep.config.run import Run, flatten, record, run_id

__all__ = ["Execution", "Run", "flatten", "override", "record", "run_id"]
