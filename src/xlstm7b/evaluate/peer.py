"""Other causal language models, loaded by `transformers`, to measure them as ours is measured."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xlstm7b.devices import default_dtype, to_device, to_dtype
from xlstm7b.evaluate.results import hash_model
from xlstm7b.evaluate.scoring import Progress
from xlstm7b.tokenizer import tokenizer_fingerprint

_FIRST_LETTERS = 1000  # no token is longer
_MAX_LOGITS = 1 << 26  # in float32 at once: 256 MiB


class Peer:
    """A model's config and tokenizer. `load` reads the weights.

    Its prompts and documents begin with the first token that its own tokenizer adds, if any.
    """

    def __init__(self, folder: Path, dtype: str | None, device: str | None) -> None:
        self.device = to_device(device)
        self.dtype = default_dtype(self.device) if dtype is None else to_dtype(dtype)
        if not folder.is_dir():
            raise ValueError(f"--peer must be a folder with a model, not {folder}")
        try:
            import transformers
        except ImportError as error:
            raise ValueError("--peer needs transformers: pip install 'xlstm7b[bench]'") from error
        with _name_folder(folder):
            config: Any = transformers.AutoConfig.from_pretrained(folder)
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        if not self.encode("a"):  # transformers makes an empty tokenizer if there is none
            raise ValueError(f"{folder} has no tokenizer; save the peer's own in its folder")
        self.folder = folder
        self._model: Any = None
        first = self._tokenizer.bos_token_id
        self._first = (
            [first] if first is not None and self._tokenizer("a").input_ids[0] == first else []
        )
        self.fingerprint = {
            "folder": str(folder),
            "fingerprint": hash_model(folder, json.loads(config.to_json_string(use_diff=False))),
            "model_type": config.model_type,
        }
        self.tokenizer_fingerprint = self._fingerprint_tokenizer()

    def _fingerprint_tokenizer(self) -> str:
        """That of our models for the same tokenizer.json; without one, a hash of the vocabulary."""
        if (self.folder / "tokenizer.json").is_file():
            try:
                return tokenizer_fingerprint(self.folder)
            except ValueError:  # of a kind that our models cannot have, such as WordPiece
                pass
        vocabulary = json.dumps(self._tokenizer.get_vocab(), sort_keys=True)
        return hashlib.sha256(vocabulary.encode()).hexdigest()

    @property
    def has_first_token(self) -> bool:
        return bool(self._first)

    def first_bytes(self, text: str) -> int:
        """The number of bytes that the text's first token covers."""
        encoded = self._tokenizer(
            text[:_FIRST_LETTERS], add_special_tokens=False, return_offsets_mapping=True
        )
        return len(text[: encoded.offset_mapping[0][1]].encode())

    def encode(self, text: str) -> list[int]:
        """The text's tokens, without a first token."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    def load(self) -> "Peer":
        """Reads the weights. Only safetensors: other formats can run code."""
        import transformers

        with _name_folder(self.folder):
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                self.folder, dtype=self.dtype or "auto", use_safetensors=True
            )
        self._model = model.to(self.device).eval()
        # A checkpoint may ask for sampling or penalties; the benchmark decodes without.
        end = model.generation_config.eos_token_id
        self._model.generation_config = transformers.GenerationConfig(
            eos_token_id=end,
            pad_token_id=end[0] if isinstance(end, list) else end,
            bos_token_id=model.generation_config.bos_token_id,
        )
        return self

    @torch.inference_mode()
    def answer(self, prompts: Sequence[str], max_new_tokens: int) -> list[str]:
        """Answers with the most likely token at each step, one prompt after the other.

        A batch would need padding, which not all recurrent models of `transformers` ignore.
        """
        answers = []
        for prompt in prompts:
            tokens = torch.tensor([self._first + self.encode(prompt)], device=self.device)
            output = self._model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )
            new = output[0, tokens.shape[1] :]
            answers.append(self._tokenizer.decode(new, skip_special_tokens=True))
        return answers

    @torch.inference_mode()
    def logprobs(
        self, documents: Sequence[Sequence[int]], progress: Progress | None = None
    ) -> list[Tensor]:
        """Log-probability of each token of each document, given all tokens before it; on the CPU.

        A document's first token has one only if the model has a first token of its own. Each
        document is read in one pass, so its length is limited by memory.
        """
        found = []
        for document in documents:
            text = self._first + list(document)
            if len(text) < 2:
                found.append(torch.zeros(0))
                continue
            tokens = torch.tensor([text], device=self.device)
            logits = self._model(tokens, use_cache=False).logits[0, :-1]
            rows = max(1, _MAX_LOGITS // logits.shape[1])
            parts = [
                part.float().log_softmax(-1).gather(-1, targets[:, None])[:, 0].cpu()
                for part, targets in zip(logits.split(rows), tokens[0, 1:].split(rows), strict=True)
            ]
            found.append(torch.cat(parts))
            if progress is not None:
                progress(len(text) - 1)
        return found


@contextmanager
def _name_folder(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of any type: each architecture has its own reader
        reason = " ".join(str(error).split())
        raise ValueError(f"transformers does not load {folder}: {reason}") from error
