"""`xlstm7b bench transformers`: the xLSTM of `transformers`, as it is and with `optimize`.

"ours" is `transformers` with `xlstm7b.integrations.transformers.optimize`. Parts: decoding through
`model.generate`, and a step of training, as `bench training` measures it for peers: compiled on a
GPU, with PyTorch's cross-entropy over all logits. Each case runs in its own process, with random
weights. `xlstm` is the authors' package; it has no `generate`.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from xlstm7b.bench import training
from xlstm7b.bench.cases import Part, Result
from xlstm7b.bench.measure import attempt, measure_steps, random_prompts
from xlstm7b.bench.peer_models import PEERS
from xlstm7b.bench.peers import in_process
from xlstm7b.bench.plans import ModelPlan, TrainingCase, Transformers

_PROMPT = 16  # tokens

_COLUMNS = ("batch", "tokens", "ms", "± %", "tok/s", "GB", "speed of ours, ×")
PARTS = {
    "generate": Part("model.generate, greedy, one token", _COLUMNS, plot=("batch", "tok/s")),
    **training.PARTS,
}


def results(plan: Transformers) -> Iterator[Result]:
    job: dict[str, Any]
    for batch in plan.batches:
        for name in ("ours", "transformers"):
            if name == "ours" or name in plan.peers:
                job = {"name": name, "batch": batch, "options": plan.to_dict()}
                row = Result("generate", name, "", plan.size, batch, _PROMPT)
                yield from in_process(row, generate, plan.timeout, **job)
    for text in plan.cases:
        case = TrainingCase.parse(text)
        for name in ("ours", *plan.peers):
            kind = "optimized" if name == "ours" else name
            job = {"name": kind, "case": asdict(case), "steps": plan.steps, "device": plan.device}
            for result in in_process(training.row(case, name), training.train, plan.timeout, **job):
                yield replace(result, name=name)


def generate(name: str, batch: int, options: dict[str, Any]) -> Iterator[Result]:
    """Times `model.generate` in this process."""
    plan = Transformers.of(**options)
    peer = PEERS["transformers"](ModelPlan.of(device=plan.device, size=plan.size, dtype=plan.dtype))
    model: Any = peer.model
    if name == "ours":
        from xlstm7b.integrations.transformers import optimize

        model = optimize(model)
    prompts = torch.tensor(random_prompts(peer.vocab_size, batch, _PROMPT), device=plan.device)

    def run(tokens: int) -> None:
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )

    case = Result("generate", name, "", plan.size, batch, _PROMPT)

    def timed(case: Result) -> Result:
        seconds, spread = measure_steps(run, plan.device, seconds=plan.seconds, base=8)
        memory = torch.cuda.max_memory_allocated() if plan.device == "cuda" else None
        speed, figures = batch / seconds, {"spread": spread}
        return replace(
            case, seconds=seconds, tokens_per_second=speed, memory=memory, figures=figures
        )

    yield attempt(case, timed)
