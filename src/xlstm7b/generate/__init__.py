"""Text from a model: sampling and decoding."""

from xlstm7b.generate.decoder import check_request, stream_tokens, with_first_token
from xlstm7b.generate.sampling import sample

__all__ = ["check_request", "sample", "stream_tokens", "with_first_token"]
