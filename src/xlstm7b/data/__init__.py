"""Text files to token shards on disk, and shards to packed training batches."""

from typing import Literal

Packing = Literal["windows", "best-fit", "documents"]
"""How documents become sequences: concatenated and cut, kept whole and padded, or one each."""
