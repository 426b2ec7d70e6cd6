"""Trains an xLSTM on texts with the Trainer of transformers, all weights or LoRA's.

    pip install 'xlstm7b[bench]' accelerate datasets peft
    python examples/transformers_trainer.py MODEL texts.jsonl OUTPUT --rank 16

MODEL is a folder or a hub id. Each line of the file is {"text": …}. OUTPUT gets the trained model
or, with --rank, the adapters in PEFT's format.
"""

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchEncoding,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
)

from xlstm7b.integrations.transformers import optimize


def main(arguments: list[str] | None = None) -> Trainer:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("texts", help="a JSONL file")
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
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = optimize(AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype))
    if given.rank:
        lora = LoraConfig(r=given.rank, lora_alpha=2 * given.rank, task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)

    def tokenize(row: dict[str, str]) -> BatchEncoding:
        text = row["text"] + tokenizer.eos_token
        tokens = tokenizer(text, truncation=True, max_length=given.max_length)
        tokens["labels"] = tokens["input_ids"].copy()
        return tokens

    texts = load_dataset("json", data_files=given.texts, split="train")
    tokens = texts.map(tokenize, remove_columns=texts.column_names)
    trainer = Trainer(
        model,
        TrainingArguments(
            given.output,
            max_steps=given.steps,
            per_device_train_batch_size=given.batch_size,
            learning_rate=given.learning_rate,
            warmup_steps=given.steps // 20,
            lr_scheduler_type="cosine",
            bf16=on_gpu,
            use_cpu=not on_gpu,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=tokens,
        # It pads labels by their length. DataCollatorForLanguageModeling ignores every label that
        # is the padding token, and with it the end of text if that is also the padding.
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
