"""RULER (arXiv 2404.06654): 13 tasks that ask how much of a long text a model really uses."""
