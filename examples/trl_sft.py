"""Supervised fine-tuning of an xLSTM with TRL's SFTTrainer, all weights or LoRA's.

    pip install 'xlstm7b[bench]' trl peft
    python examples/trl_sft.py MODEL answers.jsonl OUTPUT --rank 16

MODEL is a folder or a hub id. Each line of the file is {"prompt": …, "completion": …}, and the loss
is that of the completion; or {"messages": [{"role": …, "content": …}, …]}, and the loss is that of
the answers; or {"text": …}. Every example ends with the end of text. Examples are packed into rows
of --max-length tokens; each starts with an empty state. OUTPUT gets the trained model or, with
--rank, the adapters in PEFT's format.
"""

import argparse
from tempfile import TemporaryDirectory

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from xlstm7b.chat_format import PlainFormat
from xlstm7b.data.prepare import prepare
from xlstm7b.integrations.transformers import optimize


def read_examples(path: str, model: str) -> Dataset:
    """The ids and labels of every line, as `xlstm7b prepare` writes them; -100: not in the loss."""
    examples = []
    with TemporaryDirectory() as folder:
        data = prepare([path], f"{folder}/data", model)
        first = [] if data.bos_token_id is None else [data.bos_token_id]
        for shard in data.shards:
            for start, end in zip([0, *shard.ends], shard.ends, strict=False):
                ids = labels = shard.tokens[start:end].tolist()
                if shard.mask is not None:
                    counts = shard.mask[start:end]
                    labels = [n if one else -100 for n, one in zip(ids, counts, strict=True)]
                examples.append({"input_ids": first + ids, "labels": [-100] * len(first) + labels})
    return Dataset.from_list(examples)


def main(arguments: list[str] | None = None) -> SFTTrainer:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("answers", help="a JSONL file")
    parser.add_argument("output")
    parser.add_argument("--rank", type=int, default=0, help="of LoRA's matrices; 0: all weights")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--max-length", type=int, default=2048)
    given = parser.parse_args(arguments)

    on_gpu = torch.cuda.is_available()
    # Frozen weights can be bfloat16. Weights that are trained need more bits for small steps.
    dtype = torch.bfloat16 if on_gpu and given.rank else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    tokenizer.chat_template = tokenizer.chat_template or PlainFormat.marked_template
    model = optimize(AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype))
    lora = None
    if given.rank:
        lora = LoraConfig(r=given.rank, lora_alpha=2 * given.rank, task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        model,
        SFTConfig(
            given.output,
            max_length=given.max_length,
            packing=True,
            max_steps=given.steps,
            per_device_train_batch_size=given.batch_size,
            learning_rate=given.learning_rate,
            warmup_steps=given.steps // 20,
            lr_scheduler_type="cosine",
            gradient_checkpointing=on_gpu,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=read_examples(given.answers, given.model),
        processing_class=tokenizer,
        peft_config=lora,
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
