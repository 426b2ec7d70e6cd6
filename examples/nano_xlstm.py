"""xLSTM 7B in one file of plain PyTorch, to read beside the paper (arXiv 2503.13427).

    python examples/nano_xlstm.py train TEXT                  # trains a small model on a text file
    python examples/nano_xlstm.py generate FOLDER "prompt"    # with that model, or the released 7B

Read from top to bottom: cell, block, model, checkpoint, generation, training, command line.
Numbers in brackets, such as (3), are the paper's equations. B is the number of texts, T of tokens,
NH of heads. A head has queries and keys of d_qk numbers and values of d_hv numbers.

The package computes the same numbers faster, and does more: several documents in one row, padding,
GPU kernels, many requests at once. Its tests hold this file to the same logits and gradients.
"""

import argparse
import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

EPS = 1e-6  # keeps divisions away from 0
GATE_CAP, LOGIT_CAP = 15.0, 30.0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# 1. The cell: one token at a time, or a chunk of tokens at once, with the same result
class State(NamedTuple):
    """All that a layer remembers of the tokens so far. Its size does not depend on their number."""

    C: Tensor  # [B, NH, d_qk, d_hv]: the memory, a weighted sum of k vᵀ
    n: Tensor  # [B, NH, d_qk]: the normaliser, the same sum of k alone
    m: Tensor  # [B, NH]: C and n are stored divided by exp(m), so that they stay in range


def recurrent_step(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: State
) -> tuple[Tensor, State]:
    """One token: q, k [B, NH, d_qk], v [B, NH, d_hv]; i, f [B, NH] are the gates' pre-activations.

    The input gate is an exponential, which could overflow. So everything is divided by exp(m), with
    m the largest exponent so far. In (5) this factor cancels, so m needs no gradient.
    """
    C, n, m_before = state
    log_f = F.logsigmoid(f)
    m = torch.maximum(log_f + m_before, i).detach()  # (2)
    f_gate = torch.exp(log_f + m_before - m)[..., None]  # (7): the part that is kept
    i_gate = torch.exp(i - m)[..., None]  # (8): the weight of the new token
    C = f_gate[..., None] * C + i_gate[..., None] * k[..., :, None] * v[..., None, :]  # (3)
    n = f_gate * n + i_gate * k  # (4)
    q = q / math.sqrt(q.shape[-1])
    numerator = (q[..., None, :] @ C).squeeze(-2)
    denominator = torch.maximum((q * n).sum(-1).abs(), torch.exp(-m)) + EPS
    return numerator / denominator[..., None], State(C, n, m)  # (5)


def chunk(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: State
) -> tuple[Tensor, State]:
    """L tokens at once: q, k [B, NH, L, d_qk], v [B, NH, L, d_hv], i, f [B, NH, L].

    Hardware is fast at products of matrices, and a step has none. But (3) is linear. With C and m
    from before the chunk, b_t = Σ_{r ≤ t} logσ(f_r) and D_ts = b_t − b_s + i_s, it unrolls to

        C_t = exp(b_t + m) C + Σ_{s ≤ t} exp(D_ts) k_s v_sᵀ        (not yet divided by exp(m_t))
        C_tᵀ q_t = exp(b_t + m) Cᵀ q_t + Σ_{s ≤ t} exp(D_ts) (q_t·k_s) v_s

    The second line is the numerator of (5), without C_t: attention with weights that decay.
    """
    C, n, m_before = state
    b = F.logsigmoid(f).cumsum(-1)
    D = b[..., :, None] - b[..., None, :] + i[..., None, :]
    D = D.masked_fill(torch.ones_like(D, dtype=torch.bool).triu(1), -torch.inf)  # none for s > t
    from_state = b + m_before[..., None]
    m = torch.maximum(from_state, D.amax(-1)).detach()  # (2): the largest exponent at each t
    from_state = torch.exp(from_state - m)[..., None]  # [B, NH, L, 1]
    from_token = torch.exp(D - m[..., None])  # [B, NH, L, L]
    q = q / math.sqrt(q.shape[-1])
    scores = (q @ k.mT) * from_token
    numerator = from_state * (q @ C) + scores @ v
    normaliser = from_state * (q @ n[..., None]) + scores.sum(-1, keepdim=True)
    denominator = torch.maximum(normaliser.abs(), torch.exp(-m)[..., None]) + EPS
    # Only the last C_t is needed, the state after the chunk.
    k = from_token[..., -1, :, None] * k
    C = from_state[..., -1:, :] * C + k.mT @ v  # (3)
    n = from_state[..., -1, :] * n + k.sum(-2)  # (4)
    return numerator / denominator, State(C, n, m[..., -1])  # (5)


def mlstm_cell(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: State, size: int = 64
) -> tuple[Tensor, State]:
    """(10): any number of tokens, in chunks of `size`. Time grows with T, in attention with T²."""
    if q.shape[2] == 1:
        h, state = recurrent_step(*(x.squeeze(2) for x in (q, k, v, i, f)), state)
        return h.unsqueeze(2), state
    outputs = []
    for part in zip(*(x.split(size, dim=2) for x in (q, k, v, i, f)), strict=True):
        h, state = chunk(*part, state)
        outputs.append(h)
    return torch.cat(outputs, dim=2), state


# 2. The block: projections and gates around the cells, then a SwiGLU
def wide(x: Tensor) -> Tensor:
    """At least float32: what cell, gates, norms and logits need, whatever the weights' dtype."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """(13): limits x to ±cap, and hardly changes small values. It keeps training stable."""
    return cap * torch.tanh(x / cap)


class MLSTMLayer(nn.Module):
    """(11): all heads, with the projections and gates around them."""

    def __init__(self, config: "Config") -> None:
        super().__init__()
        self.num_heads = heads = config.num_heads
        d, qk_dim, v_dim = config.embedding_dim, heads * config.d_qk, heads * config.d_hv
        self.q = nn.Linear(d, qk_dim, bias=False)
        self.k = nn.Linear(d, qk_dim, bias=False)
        self.v = nn.Linear(d, v_dim, bias=False)
        self.ogate_preact = nn.Linear(d, v_dim, bias=False)
        self.igate_preact = nn.Linear(d, heads)  # one number for each head
        self.fgate_preact = nn.Linear(d, heads)
        self.multihead_norm = nn.ParameterDict({"weight": torch.ones(v_dim)})
        self.out_proj = nn.Linear(v_dim, d, bias=False)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        q, k, v = (
            wide(layer(x)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)  # [B, NH, T, d_qk], v [B, NH, T, d_hv]
        )
        i, f = (
            soft_cap(F.linear(wide(x), wide(gate.weight), wide(gate.bias)), GATE_CAP).mT
            for gate in (self.igate_preact, self.fgate_preact)  # [B, NH, T]
        )
        h, state = mlstm_cell(q, k, v, i, f, state)
        # The norm of (6) is a LayerNorm over each head, with one weight for all heads side by side.
        h = F.layer_norm(h, h.shape[-1:], eps=EPS).transpose(1, 2).flatten(-2).to(x.dtype)
        o = torch.sigmoid(self.ogate_preact(x))  # (9)
        return self.out_proj(o * (h * self.multihead_norm["weight"])), state  # (6)


class SwiGLU(nn.Module):
    """The MLP of (12b). It works on each token alone; only the mLSTM looks at earlier ones."""

    def __init__(self, config: "Config") -> None:
        super().__init__()
        self.proj_up_gate = nn.Linear(config.embedding_dim, config.ffn_dim, bias=False)
        self.proj_up = nn.Linear(config.embedding_dim, config.ffn_dim, bias=False)
        self.proj_down = nn.Linear(config.ffn_dim, config.embedding_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj_down(F.silu(self.proj_up_gate(x)) * self.proj_up(x))


class Block(nn.Module):
    def __init__(self, config: "Config") -> None:
        super().__init__()
        self.norm_mlstm = nn.RMSNorm(config.embedding_dim, eps=EPS)
        self.mlstm_layer = MLSTMLayer(config)
        self.norm_ffn = nn.RMSNorm(config.embedding_dim, eps=EPS)
        self.ffn = SwiGLU(config)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, state = self.mlstm_layer(self.norm_mlstm(x), state)
        z = x + y  # (12a)
        return z + self.ffn(self.norm_ffn(z)), state  # (12b)


# 3. The model: sizes, embedding, blocks, head, first weights
@dataclass
class Config:
    """The sizes of a model, named as in a checkpoint's config.json. The defaults are the 7B's."""

    embedding_dim: int = 4096  # d
    num_blocks: int = 32
    num_heads: int = 8
    vocab_size: int = 50304
    qk_dim_factor: float = 0.5
    v_dim_factor: float = 1.0
    ffn_proj_factor: float = 2.667
    ffn_round_up_to_multiple_of: int = 64
    bos_token_id: int | None = 0  # the first token of every text
    eos_token_id: int = 0  # the token after a text
    force_bos_token_insert: bool = True  # False: texts have no first token

    def __post_init__(self) -> None:
        self.d_qk = int(self.embedding_dim * self.qk_dim_factor) // self.num_heads
        self.d_hv = int(self.embedding_dim * self.v_dim_factor) // self.num_heads
        # Rounded up as in the released code, which drops the fraction first: 2048.256 gives 2048.
        multiple = self.ffn_round_up_to_multiple_of
        width = int(self.embedding_dim * self.ffn_proj_factor + multiple - 1)
        self.ffn_dim = width // multiple * multiple


class XLSTM(nn.Module):
    """The language model. Its parameters have the names of the released checkpoint."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.backbone = nn.ModuleDict()
        self.backbone["embeddings"] = nn.Embedding(config.vocab_size, config.embedding_dim)
        self.backbone["blocks"] = nn.ModuleList(Block(config) for _ in range(config.num_blocks))
        self.backbone["out_norm"] = nn.RMSNorm(config.embedding_dim, eps=EPS)
        self.lm_head = nn.Linear(config.embedding_dim, config.vocab_size, bias=False)

    def forward(self, ids: Tensor, states: list[State] | None = None) -> tuple[Tensor, list[State]]:
        """Token ids [B, T] to logits [B, T, V] and the state of each block after the last token.

        A text may come in parts: give the states after one part with the next.
        """
        config = self.config
        x = self.backbone["embeddings"](ids)
        if states is None:  # C_0 = n_0 = m_0 = 0 in every block
            shape = len(x), config.num_heads, config.d_qk, config.d_hv
            zeros = State(*(wide(x).new_zeros(shape[:dims]) for dims in (4, 3, 2)))
            states = [zeros] * config.num_blocks
        states_after = []
        for block, state in zip(self.backbone["blocks"], states, strict=True):
            x, state = block(x, state)
            states_after.append(state)
        x = self.backbone["out_norm"](x)
        return soft_cap(F.linear(wide(x), wide(self.lm_head.weight)), LOGIT_CAP), states_after

    @torch.no_grad()
    def init_weights(self) -> None:
        """First weights, for training."""
        d, blocks = self.config.embedding_dim, self.config.num_blocks
        for name, parameter in self.named_parameters():
            match name.split(".")[-2:]:
                case ["igate_preact", "bias"]:
                    parameter.fill_(-10)  # nearly closed, against spikes of the gradient
                case ["fgate_preact", "bias"]:
                    parameter.copy_(torch.linspace(3, 6, len(parameter)))  # short to long memories
                case ["igate_preact" | "fgate_preact" | "ogate_preact", "weight"]:
                    parameter.zero_()  # at first the gates do not depend on the input
                case ["out_proj" | "proj_down", _]:
                    parameter.normal_(std=2 / (blocks * math.sqrt(d)))  # a block adds little to x
                case _ if parameter.dim() == 2:
                    parameter.normal_(std=math.sqrt(2 / (5 * d)))


# 4. The checkpoint: a folder with config.json, model*.safetensors and tokenizer.json
FIXED = {"model_type": "xlstm", "quantization_config": None}  # other values are another model
FIXED |= {"gate_soft_cap": GATE_CAP, "output_logit_soft_cap": LOGIT_CAP}
FIXED |= {"norm_eps": EPS, "cell_norm_eps": EPS, "eps": EPS}


def load_config(folder: Path) -> Config:
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name, value in FIXED.items():
        if values.get(name, value) != value:
            raise ValueError(f"{folder} has {name} = {values[name]!r}; only {value!r} works here")
    for name, other in (("embedding_dim", "hidden_size"), ("num_blocks", "num_hidden_layers")):
        values.setdefault(name, values.get(other))
    config = Config(**{f.name: values[f.name] for f in fields(Config) if f.name in values})
    if config.eos_token_id == 2 and config.vocab_size == 50304:
        config.eos_token_id = 0  # the released config says 2, but that is "!"; 0 ends documents
    return config


def load(folder: Path, dtype: torch.dtype | None = None) -> XLSTM:
    """The model in a folder, in this dtype, or else in that of its files."""
    with torch.device("meta"):  # no memory: the tensors of the files take the parameters' place
        model = XLSTM(load_config(folder))
    weights = {}
    for path in sorted(folder.glob("model*.safetensors")):  # one file, or several parts
        weights |= {key: x.to(DEVICE, dtype) for key, x in load_file(path).items()}
    model.load_state_dict(weights, assign=True)  # an error if a name or a shape is wrong
    return model


def save(model: XLSTM, folder: Path, tokenizer: Path | None) -> None:
    folder.mkdir(parents=True)
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**FIXED, **asdict(model.config)}, indent=2))
    if tokenizer:
        (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())


def encode(text: str, tokenizer: Tokenizer | None) -> list[int]:
    """Without a tokenizer.json every byte is a token: its value + 2. 0 ends a text, 1 is unused."""
    if tokenizer is None:
        return [byte + 2 for byte in text.encode()]
    return tokenizer.encode(text, add_special_tokens=False).ids


def decode(ids: list[int], tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return bytes(i - 2 for i in ids if 2 <= i < 258).decode(errors="replace")
    return tokenizer.decode(ids)


# 5. Generation, from a state of constant size
@torch.no_grad()
def generate(model: XLSTM, prompt: list[int], count: int, temperature: float = 1.0) -> list[int]:
    """Up to `count` tokens after the prompt. With temperature 0 each is the likeliest.

    All that the model has read is in `states`. So a token takes the same time and memory after ten
    tokens and after a million. The prompt is read in parts, so that its length does not matter.
    """
    config, states, output = model.config, None, []
    if config.force_bos_token_insert and prompt[:1] != [config.bos_token_id]:
        prompt = [config.bos_token_id, *prompt]
    for part in torch.tensor([prompt], device=DEVICE).split(1024, dim=1):
        logits, states = model(part, states)
    while len(output) < count:
        token = logits[:, -1].argmax(-1, keepdim=True)
        if temperature > 0:
            token = torch.multinomial(torch.softmax(logits[:, -1] / temperature, -1), 1)
        if token.item() == config.eos_token_id:
            break
        output.append(token.item())
        logits, states = model(token, states)
    return output


# 6. Training, on random parts of a text
def train(model: XLSTM, ids: list[int], steps: int, batch: int = 16, length: int = 256) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    data, length = torch.tensor([0, *ids]), min(length, len(ids))
    for step in range(1, steps + 1):
        # The learning rate rises for a tenth of the steps, then falls to 0.
        rate = 3e-3 * min(10 * step / steps, 1 - (step - 1) / steps)
        optimizer.param_groups[0]["lr"] = rate
        start = torch.randint(len(ids) - length + 1, (batch, 1))
        tokens = data[start + torch.arange(length + 1)].to(DEVICE)
        tokens[:, 0] = model.config.bos_token_id  # each row starts as a prompt does
        logits, _ = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if step % 10 == 0 or step == steps:
            print(f"step {step} of {steps}: loss {loss.item():.3f}", flush=True)


# 7. The command line
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="xLSTM 7B in one file of plain PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("train", help="trains a small model on a text file")
    command.add_argument("text", type=Path, help="in UTF-8")
    command.add_argument(
        "--output", type=Path, default=Path("runs/nano"), help="runs/nano by default"
    )
    command.add_argument("--tokenizer", type=Path, help="a tokenizer.json; without one, bytes")
    command.add_argument("--steps", type=int, default=500, help="500 by default")
    command = commands.add_parser("generate", help="continues a prompt")
    command.add_argument("folder", type=Path, help="a checkpoint, such as what `train` wrote")
    command.add_argument("prompt")
    command.add_argument("--max-tokens", type=int, default=200, help="200 by default")
    command.add_argument("--temperature", type=float, default=0.8, help="0.8 by default")
    options = parser.parse_args(arguments)
    try:
        {"train": run_train, "generate": run_generate}[options.command](options)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def run_train(options: argparse.Namespace) -> None:
    if options.output.exists():
        raise ValueError(f"{options.output} exists already; choose another folder with --output")
    tokenizer, size, end = None, 320, 0
    if options.tokenizer:
        tokenizer = Tokenizer.from_str(options.tokenizer.read_text(encoding="utf-8"))
        size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id("<|endoftext|>")
    ids = encode(options.text.read_text(encoding="utf-8"), tokenizer)
    if not ids or end is None:
        raise ValueError("the text is empty, or the tokenizer has no token <|endoftext|>")
    model = XLSTM(Config(256, 4, 4, size, bos_token_id=end, eos_token_id=end)).to(DEVICE)
    model.init_weights()
    train(model, ids, options.steps)
    save(model, options.output, options.tokenizer)


def run_generate(options: argparse.Namespace) -> None:
    file = options.folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file)) if file.exists() else None
    model = load(options.folder, torch.bfloat16 if DEVICE == "cuda" else None)
    prompt = encode(options.prompt, tokenizer)
    output = generate(model, prompt, options.max_tokens, options.temperature)
    print(options.prompt + decode(output, tokenizer))


if __name__ == "__main__":
    main()
