"""Prepares token shards with datatrove, which runs on many processes, or on Slurm or Ray nodes.

    pip install 'xlstm7b[data]'
    python examples/prepare_with_datatrove.py TEXTS OUTPUT --tokenizer tokenizer.json --tasks 8
    xlstm7b prepare --verify OUTPUT

TEXTS is a folder of .jsonl, .jsonl.gz or .jsonl.zst. `xlstm7b prepare` does the same on one
machine; datatrove can also filter, deduplicate and read from S3 (add such steps before the last).
Task i of n reads every n-th file and writes OUTPUT/0000i_unshuffled.ds, so have many files. A
second run continues with the unfinished tasks. Training shuffles documents, so this does not.

On a cluster, replace LocalPipelineExecutor as below, then run `xlstm7b prepare --adopt OUTPUT`:

    from datatrove.executor import SlurmPipelineExecutor
    SlurmPipelineExecutor(steps, tasks=1000, time="10:00:00", partition="cpu", logging_dir=…).run()
"""

import argparse
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer

from xlstm7b.data.prepare import adopt
from xlstm7b.data.shards import ShardFolder


def prepare(texts: Path, output: Path, tokenizer: Path, column: str, tasks: int) -> ShardFolder:
    steps = [
        JsonlReader(str(texts), text_key=column, glob_pattern="**/*.jsonl*"),
        DocumentTokenizer(
            str(output),
            tokenizer_name_or_path=str(tokenizer),
            eos_token="<|endoftext|>",  # the tokenizer's end of text, after every document
            shuffle_documents=False,
        ),
    ]
    # datatrove's logs, which record the finished tasks, are not kept among the shards.
    logs = output.with_name(f"{output.name}-logs")
    LocalPipelineExecutor(steps, tasks=tasks, logging_dir=str(logs)).run()
    # Adds the manifest: from now on another tokenizer or a damaged shard is an error.
    return adopt(output, tokenizer)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Prepares token shards with datatrove.")
    parser.add_argument("texts", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--column", default="text")
    parser.add_argument("--tasks", type=int, default=2)
    given = parser.parse_args(arguments)
    folder = prepare(given.texts, given.output, given.tokenizer, given.column, given.tasks)
    print(f"{given.output}: {folder.tokens:,} tokens, {folder.documents:,} documents")


if __name__ == "__main__":
    main()
