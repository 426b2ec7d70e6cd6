"""Text files to token shards on disk, and shards to packed training batches."""

from typing import Literal

Packing = Literal["windows", "best-fit"]
"""How documents become sequences: concatenated and cut, or kept whole and padded."""
