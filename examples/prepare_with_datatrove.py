"""Token shards by datatrove, in as many processes, or on as many Slurm or Ray nodes, as you have.

    pip install 'xlstm7b[data]'
    python examples/prepare_with_datatrove.py TEXTS OUTPUT --tokenizer tokenizer.json --tasks 8
    xlstm7b prepare --verify OUTPUT

TEXTS is a folder of .jsonl, .jsonl.gz or .jsonl.zst. `xlstm7b prepare` does the same on one
machine; datatrove also filters, deduplicates and reads from S3 (put those steps before the last).
Task i of n reads every n-th file, and writes OUTPUT/0000i_unshuffled.ds: have many files. Run again
and it does what is not done. Training shuffles by document, so nothing is shuffled here.

On a cluster, in the place of LocalPipelineExecutor, and `xlstm7b prepare --adopt OUTPUT` after it:

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
            eos_token="<|endoftext|>",  # id 0, with which every document has to end
            shuffle_documents=False,
        ),
    ]
    # Its notes of what is done are not among the shards.
    logs = output.with_name(f"{output.name}-logs")
    LocalPipelineExecutor(steps, tasks=tasks, logging_dir=str(logs)).run()
    # The manifest: from here on, another tokenizer or a damaged shard is refused.
    return adopt(output, tokenizer)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Token shards by datatrove.")
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
