"""One batch of texts: their prompts read together, then a token of each at a time."""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from xlstm7b.generate.decoder import Decoder
from xlstm7b.generate.requests import Request
from xlstm7b.generate.states import TextState
from xlstm7b.generate.texts import Completion, GrowingText, Speeds, peak_memory
from xlstm7b.tokenizer import Tokenizer

Step = tuple[int, str, int, Completion | None]


@torch.inference_mode()
def read_prompts(
    decoder: Decoder,
    requests: Sequence[Request],
    state: TextState | None,
    progress: Callable[[int], None] | None = None,
) -> list[int]:
    """Has row r read request order[r], the longest first; returns that order."""
    order = sorted(range(len(requests)), key=lambda index: -len(requests[index].ids))
    if state is not None and order != sorted(order):
        state = state.select(order)
    decoder.start(state)
    prompts = [requests[index].ids for index in order]
    if prompts[0]:
        decoder.prefill([prompt for prompt in prompts if prompt], progress)
    return order


@torch.inference_mode()
def taken(decoder: Decoder, rows: list[int]) -> TextState:
    """Where these rows are, as states of their own."""
    return TextState(decoder.model.config, decoder.state, decoder.logits).select(rows)


def continued(
    decoder: Decoder,
    tokenizer: Tokenizer,
    order: Sequence[int],
    requests: Sequence[Request],
    keep_state: bool,
    should_stop: Callable[[], bool],
    started: float,
) -> Iterator[list[Step]]:
    """At every token: (request, new text, token, completion if that was the last) of each.

    On a GPU the next token is under way while this one's text is made. By the time that a row
    is seen to be over its last token has been read, or is read if the state is kept; the row
    stops before it reads another.
    """
    ahead = decoder.model.device.type == "cuda"
    texts = []
    for row, index in enumerate(order):
        request = requests[index]
        seed = request.settings.seed
        seed = secrets.randbits(64) if seed is None else seed
        decoder.sampler.set_row(
            row,
            request.settings,
            seed=seed,
            prompt=[*request.already_read, *request.ids],
            generated=request.already_generated,
        )
        texts.append(GrowingText(tokenizer, request.settings, request.stop_strings))
    decoder.sample()
    coming = decoder.results()
    running, first_token = list(range(len(texts))), 0.0
    while running:
        results = coming
        if ahead:
            decoder.decode_one()
            coming = decoder.results()
        tokens, *logprobs = results.lists()
        now = time.perf_counter()
        first_token = first_token or now
        asked = should_stop()
        pieces = {}
        for row in running:
            pieces[row] = texts[row].push(tokens[row], *(part[row] for part in logprobs))
            if asked and texts[row].finish_reason is None:
                pieces[row] += texts[row].finish("stop")
        over = [row for row in running if texts[row].finish_reason is not None]
        running = [row for row in running if texts[row].finish_reason is None]
        if not ahead and (running or keep_state):
            decoder.decode_one()
            coming = decoder.results()
        finished = {}
        for row in over:
            decoder.sampler.stop_row(row)
            seconds = first_token - started, now - first_token
            length = len(requests[order[row]].ids)
            speeds = Speeds(length, *seconds, peak_memory(decoder.model.device))
            kept = taken(decoder, [row]) if keep_state else None
            finished[row] = texts[row].completion(speeds, kept)
        yield [(order[row], text, tokens[row], finished.get(row)) for row, text in pieces.items()]
