"""A chat is the same tokens everywhere: in training, `chat`, `serve`, `eval` and `transformers`."""

import json
import os
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from commands import CHATML
from live_server import serving
from tokenizer_kinds import gpt2, llama3, qwen, sentencepiece
from train_processes import run
from train_runs import recipe

from xlstm7b.cli.loading import open_model
from xlstm7b.data.prepare import prepare
from xlstm7b.data.shards import ShardFolder
from xlstm7b.generate.chat import Chat
from xlstm7b.tokenizer import open_tokenizer, with_first_token
from xlstm7b.train.run_checkpoints import export_run

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
harness = pytest.importorskip("xlstm7b.evaluate.harness", reason="lm_eval is not installed")

# In the style of Llama 3, with its answers marked.
HEADERS = (
    "{{ bos_token }}{% for m in messages %}{{ '<|head|>' + m.role + '<|/head|>\n\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<|eot|>' }}"
    "{% endgeneration %}{% else %}{{ m.content | trim + '<|eot|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
# In the style of Llama 2: a first token in every turn, and the end of text after every answer.
INST = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
CASES: dict[str, tuple[Callable[[Path], Path] | None, str | None, tuple[str, str]]] = {
    "bytes": (None, None, (" {}\nUser:", " {}")),
    "plain": (gpt2, None, (" {}\nUser:", " {}")),
    "chatml": (qwen, CHATML, ("{}<|im_end|>", "{}<|im_end|>")),
    "headers": (llama3, HEADERS, ("{}<|eot|>", "{}<|eot|>")),
    "inst": (sentencepiece, INST, (" {} </s>", " {} ")),
}
ANSWERS = ["A colour, the quick  one.", "Grüße:\n    indented 日本"]
TALK = [
    {"role": "user", "content": "What is red?"},
    {"role": "assistant", "content": f" {ANSWERS[0]}\n"},
    {"role": "user", "content": "And the fox?"},
    {"role": "assistant", "content": ANSWERS[1]},
]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, ShardFolder, Path]:
    """A case, its data, and a model that was trained on it and exported."""
    make, template, _ = CASES[request.param]
    tokenizer: str | Path = "bytes"
    if make is not None:
        tokenizer = make(tmp_path / "tokenizer")
        (tokenizer / "chat_template.jinja").unlink(missing_ok=True)
        if template is not None:
            (tokenizer / "chat_template.jinja").write_text(template)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    data = prepare([tmp_path / "a.jsonl"], tmp_path / "data", tokenizer)
    first = "force_bos_token_insert=false" if data.bos_token_id is None else "bos_token_id={}"
    chosen = recipe(
        data.path,
        "model.vocab_size=448",
        f"model.eos_token_id={data.eos_token_id}",
        f"model.{first.format(data.bos_token_id)}",
        "data.context_length=16",
        "run.steps=4",
        "run.validate_every=0",
    )
    run(0, chosen, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "export")
    return request.param, data, tmp_path / "export"


def test_a_chat_is_the_same_tokens_everywhere(case, monkeypatch: pytest.MonkeyPatch) -> None:
    name, data, folder = case
    opened = open_model(str(folder), None, "float32", "cpu")
    tokenizer, chat_format = open_tokenizer(folder), opened.chat_format()
    # 1. transformers, as the reference: the whole chat, and the prompts of both answers.
    theirs = transformers.AutoTokenizer.from_pretrained(folder)

    def reference(messages, **options):
        return theirs.apply_chat_template(messages, return_dict=False, **options)

    whole = reference(TALK)
    prompts = [reference(TALK[:end], add_generation_prompt=True) for end in (1, 3)]
    # 2. Training: the text up to the end of the last answer, then the end of text.
    [shard] = data.shards
    trained = with_first_token(opened.config, shard.tokens.tolist()[:-1])
    assert whole[: len(trained)] == trained
    rest = whole[len(trained) :]
    assert rest == [data.eos_token_id] or tokenizer.decode(rest, continues=True).strip() == ""
    assert [trained[: len(prompt)] for prompt in prompts] == prompts
    # Every answer counts in the loss, and so does its end.
    runs = [
        shard.tokens[list(part)].tolist()
        for counts, part in groupby(range(len(shard.tokens)), key=lambda n: shard.mask[n])
        if counts
    ]
    wanted = [end.format(answer) for end, answer in zip(CASES[name][2], ANSWERS, strict=True)]
    encoded = [tokenizer.encode(text, continues=True) for text in wanted]
    assert runs == [encoded[0], [*encoded[1], data.eos_token_id]]
    if name == "headers":  # transformers finds the same answers
        found = theirs.apply_chat_template(
            TALK, return_dict=True, return_assistant_tokens_mask=True
        )
        assert found["assistant_masks"] == [0, *shard.mask[:-1].tolist()]
    # 3. serve
    generator = opened.load()
    with serving(generator, chat_format=chat_format) as live:
        for end, prompt in zip((1, 3), prompts, strict=True):
            ids = live.post("/tokenize", messages=TALK[:end])["tokens"]
            assert with_first_token(opened.config, ids) == prompt
    # 4. eval --apply-chat-template
    model = harness.XLSTM7B(str(folder), device="cpu", batch_size=1)
    for end, prompt in zip((1, 3), prompts, strict=True):
        ids = model.tok_encode(model.apply_chat_template(TALK[:end]))
        assert with_first_token(opened.config, ids) == prompt
    # 5. chat, which reads turn by turn: prompt, answer and the next prompt.
    asked: list[str] = []
    stream = generator.stream
    monkeypatch.setattr(
        generator, "stream", lambda text, **options: asked.append(text) or stream(text, **options)
    )
    list(Chat(generator, chat_format, max_new_tokens=1).say(TALK[0]["content"]))
    first = with_first_token(opened.config, tokenizer.encode(asked[0]))
    assert first == prompts[0]
    following = chat_format.next_prompt(TALK[2]["content"])
    answer = wanted[0].removesuffix(chat_format.stop_string).rstrip()
    turns = [tokenizer.encode(text, continues=True) for text in (answer, following)]
    assert [*first, *turns[0], *turns[1]] == prompts[1]


def test_masks_cover_whole_tokens_of_any_answer(tmp_path: Path) -> None:
    """Spaces that a post-processor leaves out of a token's offsets count too."""
    answer = "  if x:\n        return  é  # 日本 🐿\n\n\ndone  "
    record = {"prompt": "def f(x):\n", "completion": answer}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    for make in (gpt2, llama3, qwen, sentencepiece):
        folder = make(tmp_path / make.__name__)
        data = prepare([tmp_path / "a.jsonl"], tmp_path / f"{make.__name__}-data", folder)
        [shard] = data.shards
        tokenizer = open_tokenizer(folder)
        assert shard.tokens[:-1].tolist() == tokenizer.encode(record["prompt"] + answer)
        counted = shard.tokens[np.flatnonzero(shard.mask)].tolist()
        text = tokenizer.decode(counted, continues=True)
        assert text.endswith(answer)
        assert len(text) - len(answer) <= 1  # a token may begin with the prompt's last newline


@pytest.mark.skipif(
    not {"XLSTM7B_GSM8K", "XLSTM7B_NEOX_TOKENIZER"} <= os.environ.keys(),
    reason="XLSTM7B_GSM8K and XLSTM7B_NEOX_TOKENIZER name no folder and no tokenizer.json",
)
def test_gsm8k_is_prepared_as_transformers_would(tmp_path: Path) -> None:
    """Real questions and answers, with the tokenizer of the 7B and a template of special tokens."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(Path(os.environ["XLSTM7B_NEOX_TOKENIZER"]).read_bytes())
    template = CHATML.replace("<|im_end|>", "{{ eos_token }}")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|endoftext|>", "chat_template": template})
    )
    path = Path(os.environ["XLSTM7B_GSM8K"]) / "train.jsonl"
    data = prepare([path], tmp_path / "data", folder, processes=2)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    [shard] = data.shards
    documents = np.split(shard.tokens, shard.ends)[:-1]
    assert len(documents) == len(records) == 7473
    decode = theirs.decode
    for record, document, mask in zip(
        records, documents, np.split(shard.mask, shard.ends)[:-1], strict=True
    ):
        talk = [
            {"role": "user", "content": record["question"]},
            {"role": "assistant", "content": record["answer"]},
        ]
        whole = theirs.apply_chat_template(talk, return_dict=False)
        assert whole[: len(document)] == document.tolist()
        assert decode(document[mask == 1].tolist()) == record["answer"].strip() + "<|endoftext|>"
