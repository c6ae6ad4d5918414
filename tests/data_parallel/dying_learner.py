"""A learner that `ddp.execute` starts; the second one is killed at the end of the epoch after so
many.
"""

from __future__ import annotations

import os
import signal
import sys

from commsweep.processes import ddp
from commsweep.training.step import Task

whole = Task.on_train_epoch_start


def dying(task: Task) -> None:
    if os.environ["RANK"] == "1" and task.current_epoch == int(os.environ["KILLED"]):
        os.kill(os.getpid(), signal.SIGKILL)
    whole(task)


Task.on_train_epoch_start = dying
if __name__ == "__main__":
    sys.exit(ddp.main(sys.argv[1]))
