"""How good a model is: the LM Evaluation Harness, perplexity, RULER, and results to compare."""
