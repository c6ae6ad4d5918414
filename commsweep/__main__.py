"""`python -m commsweep` is the `commsweep` command."""

import sys

from commsweep.main import main

sys.exit(main())
