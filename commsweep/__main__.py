"""`python -m commsweep`: the command, where torchrun wants a module."""

from __future__ import annotations

import sys

from commsweep.main import main

if __name__ == "__main__":
    sys.exit(main())
