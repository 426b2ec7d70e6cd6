"""Trains an xLSTM on preferences with TRL's DPOTrainer: direct preference optimisation, with LoRA.

    pip install 'xlstm7b[bench]' trl peft
    python examples/trl_dpo.py MODEL pairs.jsonl OUTPUT

MODEL is a folder or a hub id. Each line of the file is {"prompt": …, "chosen": …, "rejected": …}.
The reference is the model without its adapters, so that there is one copy of the weights. OUTPUT
gets the adapters in PEFT's format.
"""

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from xlstm7b.chat_format import PlainFormat
from xlstm7b.integrations.transformers import optimize


def main(arguments: list[str] | None = None) -> DPOTrainer:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("pairs", help="a JSONL file")
    parser.add_argument("output")
    parser.add_argument("--rank", type=int, default=16, help="of LoRA's matrices")
    parser.add_argument("--beta", type=float, default=0.1, help="higher: stays closer to the model")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=4, help="pairs of one step")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--max-length", type=int, default=1024)
    given = parser.parse_args(arguments)

    on_gpu = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    tokenizer.chat_template = tokenizer.chat_template or PlainFormat.marked_template
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = optimize(AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype))
    trainer = DPOTrainer(
        model,
        args=DPOConfig(
            given.output,
            beta=given.beta,
            max_length=given.max_length,
            max_steps=given.steps,
            per_device_train_batch_size=given.batch_size,
            learning_rate=given.learning_rate,
            warmup_steps=given.steps // 20,
            gradient_checkpointing=on_gpu,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=load_dataset("json", data_files=given.pairs, split="train"),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=given.rank, lora_alpha=2 * given.rank, task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
