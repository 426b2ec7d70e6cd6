"""Small tokenizers like those of well-known models, in folders as the hub has them."""

import json
from pathlib import Path

from commands import CHATML
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import trainers as training

LINES = [
    "The quick brown fox jumps over the lazy dog, and the dog lets it.",
    "so much depends upon a red wheel barrow glazed with rain water",
    "Grüße aus Linz: naïve façade, Übermut.",
]
SPLIT = Regex(r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+")


def gpt2(folder: Path) -> Path:
    """Byte-level BPE. The last id is the first token and the end of text."""
    backend = _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.add_special_tokens(["<|endoftext|>"])
    end = "<|endoftext|>"
    return _save(backend, folder, bos_token=end, eos_token=end, tokenizer_class="GPT2Tokenizer")


def llama3(folder: Path) -> Path:
    """Byte-level BPE with a first token and an end of text of its own, both added at the end."""
    splits = [pre_tokenizers.Split(SPLIT, "isolated"), _byte_splits()]
    backend = _byte_level(pre_tokenizers.Sequence(splits))
    backend.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    template = _template(backend, "<|begin_of_text|>")
    backend.post_processor = processors.Sequence([processors.ByteLevel(), template])
    begin = {"content": "<|begin_of_text|>", "special": True}
    return _save(backend, folder, bos_token=begin, eos_token="<|end_of_text|>")


def qwen(folder: Path) -> Path:
    """Byte-level BPE without a first token, and with a chat template."""
    splits = [pre_tokenizers.Split(SPLIT, "isolated"), _byte_splits()]
    backend = _byte_level(pre_tokenizers.Sequence(splits))
    backend.normalizer = normalizers.NFC()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    end = "<|endoftext|>"
    return _save(
        backend, folder, bos_token=None, eos_token=end, pad_token=end, chat_template=CHATML
    )


def sentencepiece(folder: Path) -> Path:
    """BPE over characters with bytes for the others, as of Llama 2: a space before every text."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(LINES, training.BpeTrainer(vocab_size=160, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    backend = Tokenizer(
        models.BPE(
            vocab={piece: token for token, piece in enumerate([*_with_bytes(), *pieces])},
            merges=[tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return _save_pieces(backend, folder)


def unigram(folder: Path) -> Path:
    """A Unigram model with bytes for characters that are not in it."""
    pieces = sorted({*"".join(LINES[:2]).replace(" ", "▁"), "▁the", "▁dog", "ed", "▁a", "er"})
    scored = [(piece, -float(len(_with_bytes()))) for piece in _with_bytes()]
    scored += [(piece, -3.0 / len(piece)) for piece in pieces]
    backend = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return _save_pieces(backend, folder)


KINDS = {make.__name__: make for make in (gpt2, llama3, qwen, sentencepiece, unigram)}


def _byte_splits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _byte_level(splits: pre_tokenizers.PreTokenizer) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = splits, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = training.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(LINES, trainer)
    return backend


def _with_bytes() -> list[str]:
    return ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]


def _save_pieces(backend: Tokenizer, folder: Path) -> Path:
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = _template(backend, "<s>")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _save(backend, folder, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _template(backend: Tokenizer, first: str) -> processors.PostProcessor:
    specials = [(first, backend.token_to_id(first))]
    return processors.TemplateProcessing(
        single=f"{first} $A", pair=f"{first} $A {first}:1 $B:1", special_tokens=specials
    )


def _save(backend: Tokenizer, folder: Path, **described: object) -> Path:
    folder.mkdir(parents=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder
