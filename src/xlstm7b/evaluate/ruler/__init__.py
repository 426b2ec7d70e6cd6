"""RULER (arXiv 2404.06654): 13 tasks that measure how much of a long context a model uses."""
