"""Text → token shards on disk → packed batches. Nothing here imports torch before it must."""
