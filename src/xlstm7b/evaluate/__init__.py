"""Model quality: LM Evaluation Harness tasks, perplexity, RULER, and files of results."""
