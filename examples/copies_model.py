"""Writes first weights of a 160M that copies before it is trained.

    python examples/copies_model.py copies-first

examples/copies-160m.toml is the recipe to train it, and has all commands.

To copy, a model finds where its latest tokens occurred before, and outputs what followed there.
With the usual first weights, most of a short training is spent until it does. Here the weights do
it from the start, for about 70% of the tokens of a copy, and training makes it better.

The vectors between blocks have equal parts: one for the current token, one for each of the 5 tokens
before it, and one for the token that is found to come next. One more number is the same for all
tokens.

1. The embedding writes a random vector for each token, and the constant.
2. Each of the first 5 blocks reads one part and writes what it was at the position before into the
   next part. Two heads have constant queries and keys, so their output is a sum over all tokens,
   weighted by the forget gate alone. One head forgets at once and has the current token. The other
   one keeps 27% in each step. Their difference is the token before, and less of those before it.
3. The other blocks look up. A query is a random projection of the latest five tokens, a key the
   same projection of the five before the current one, and the value is the current token. So a
   query is most similar to the keys after the same five tokens.
4. The output head reads the token that was found.
"""

import argparse
import math
import sys
from itertools import pairwise

import torch
from torch import Tensor

from xlstm7b import XLSTM, ModelConfig
from xlstm7b.checkpoint import check_target
from xlstm7b.model import MLSTMLayer

LAGS = 5  # earlier tokens that are compared
SIZE = 8.0  # of the vector of a token; large, so that training changes it slowly
KEPT = -1.0  # forget gate of a head that sees the tokens before; σ(−1) is 0.27
FOUND = 2.0  # size of what the lookups find, in units of SIZE
SHARPNESS = 1.5  # of the head
OFFSET = 0.5  # keeps the values away from 0 where there is no token before, for small gradients


@torch.no_grad()
def first_weights(config: ModelConfig) -> XLSTM:
    if config.other_classes():
        raise ValueError("only the block of xLSTM 7B has such first weights")
    model = XLSTM(config)
    lags = min(LAGS, config.num_blocks // 2)
    size = min((config.embedding_dim - 1) // (lags + 2), config.d_hv - 1)
    parts = [slice(n * size, (n + 1) * size) for n in range(lags + 2)]
    tokens = torch.nn.functional.normalize(torch.randn(config.vocab_size, size))
    embedding, head = model.backbone.embeddings.weight.zero_(), model.lm_head.weight.zero_()
    embedding[:, parts[0]] = SIZE * tokens
    embedding[:, -1] = SIZE / 2
    head[:, parts[-1]] = SHARPNESS * tokens
    for block in model.backbone.blocks:  # what is not written below writes nothing at first
        block.ffn.proj_down.weight.zero_()
        block.mlstm_layer.out_proj.weight.zero_()
        block.mlstm_layer.igate_preact.bias.zero_()
    layers = [block.mlstm_layer for block in model.backbone.blocks]
    for layer, source, target in zip(layers, parts[:-2], parts[1:-1], strict=False):
        write_previous(layer, config, source, target)
    for layer in layers[lags:]:
        look_up(layer, config, parts, len(layers) - lags)
    return model


def write_previous(layer: MLSTMLayer, config: ModelConfig, source: slice, target: slice) -> None:
    """The first two heads write into `target` what `source` was at the position before."""
    kept = 1 / (1 + math.exp(-KEPT))
    # A norm divides the sum x + kept · x' + kept² · x'' + … by its size.
    shares = -1 / kept, 1 / (kept * math.sqrt(1 - kept**2))
    layer.fgate_preact.bias[:2] = torch.tensor([-14.0, KEPT])
    basis = random_basis(config.d_hv, source.stop - source.start + 1)
    projection, constant = basis[:, :-1], basis[:, -1]
    for head, share in enumerate(shares):
        queries, values = rows_of_head(config, head)
        for weight in (layer.q.weight, layer.k.weight):
            weight[queries] = 0
            weight[queries.start, -1] = 1
        layer.v.weight[values] = 0
        layer.v.weight[values, source] = projection
        layer.v.weight[values, -1] = OFFSET * constant
        write(layer, values, target, SIZE * share * projection)


def look_up(layer: MLSTMLayer, config: ModelConfig, parts: list[slice], blocks: int) -> None:
    """All heads write the token that followed the latest tokens into the last part."""
    layer.fgate_preact.bias.fill_(8.0)
    for weight in (layer.q.weight, layer.k.weight, layer.v.weight):
        weight.zero_()
    for head in range(config.num_heads):
        queries, values = rows_of_head(config, head)
        for now, before in pairwise(parts[:-1]):
            projection = torch.randn(config.d_qk, now.stop - now.start) / math.sqrt(config.d_qk)
            layer.q.weight[queries, now] = projection
            layer.k.weight[queries, before] = projection
        projection = random_basis(config.d_hv, parts[0].stop - parts[0].start)
        layer.v.weight[values, parts[0]] = projection
        share = SIZE * FOUND / (config.num_heads * blocks)
        write(layer, values, parts[-1], share * projection)


def rows_of_head(config: ModelConfig, head: int) -> tuple[slice, slice]:
    """The rows of a head in the weights of queries and keys, and in that of values."""
    queries, values = head * config.d_qk, head * config.d_hv
    return slice(queries, queries + config.d_qk), slice(values, values + config.d_hv)


def random_basis(rows: int, columns: int) -> Tensor:
    """A random matrix with orthogonal columns of length 1."""
    return torch.linalg.qr(torch.randn(rows, columns))[0]


def write(layer: MLSTMLayer, values: slice, target: slice, projection: Tensor) -> None:
    """The head with these values writes into `target`, by the transpose of `projection`."""
    # The norm of a head makes vectors of size √d_hv, and output gates start at ½.
    layer.out_proj.weight[target, values] = 2 / math.sqrt(len(projection)) * projection.T


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Writes first weights of a model that copies.")
    parser.add_argument("folder", help="the checkpoint folder to write")
    parser.add_argument("--size", default="160m", help="a named size, such as tiny or 160m (160m)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    torch.manual_seed(given.seed)
    try:
        check_target(given.folder)
        first_weights(ModelConfig.named(given.size)).save_pretrained(given.folder)
    except (ValueError, OSError) as error:
        print(f"copies_model: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{given.folder}: first weights of a {given.size}")


if __name__ == "__main__":
    main()
