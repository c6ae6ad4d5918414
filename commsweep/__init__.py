"""commsweep: how far can the messages of distributed training be squeezed before training breaks?

The one name that users import. The rooms experiments, sweeps and analysis lie beside this folder and are its
subpackages, so a folder of the same name in a user's project neither breaks them nor is hidden by them:

    from commsweep.experiments import compressors
"""

from pathlib import Path

__path__.append(str(Path(__file__).resolve().parent.parent))
