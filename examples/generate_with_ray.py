"""Completes or scores many JSONL files with Ray Data: one model a worker, on one machine or many.

    pip install 'xlstm7b[ray]'
    python examples/generate_with_ray.py MODEL OUTPUT questions/*.jsonl --workers 8 --gpus 1

A line is {"prompt": "…"}, with any other fields. Lines with the same "prefix" share a text before
their prompts, which each worker reads once. OUTPUT gets one file for every 256 lines; `cat` joins
them in order. If the run is interrupted, the same command continues it. If a worker dies,
another one does its lines. With --score, each line gets the log-probability of its prompt.

On a cluster, start Ray on all nodes (`ray start`, KubeRay, or a Slurm job) and set RAY_ADDRESS. The
files must be on a file system that all nodes have.
"""

import argparse
import sys
from pathlib import Path

from xlstm7b.integrations.ray import Work, process_files


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Completes or scores JSONL files with Ray Data.")
    parser.add_argument("model", help="checkpoint folder or hub id")
    parser.add_argument("output", type=Path, help="folder for the results")
    parser.add_argument("files", nargs="+", help="JSONL files")
    parser.add_argument("--workers", type=int, default=1, help="models at the same time")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each worker")
    parser.add_argument("--batch-size", type=int, default=32, help="lines at a time in a worker")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--score", action="store_true", help="log-probabilities of the prompts")
    given = parser.parse_args(arguments)
    sampling = {"max_new_tokens": given.max_new_tokens, "temperature": given.temperature}
    work = Work(given.model, given.score, sampling, given.batch_size)
    try:
        written = process_files(
            given.files, given.output, work, workers=given.workers, gpus_per_worker=given.gpus
        )
    except ValueError as error:
        print(f"generate_with_ray: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{given.output}: {len(written)} files")


if __name__ == "__main__":
    main()
