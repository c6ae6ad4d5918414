"""Codes of single values, which may also code the values that a sparsifier keeps, and a rotated
message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commsweep.config.base import define, union
from commsweep.config.compressors.base import Compression

define(__name__, __file__)
if TYPE_CHECKING:
    ValueSpec = Compression
else:
    ValueSpec = union(Compression, "codes_values")
