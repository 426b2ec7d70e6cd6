"""Triton kernels of the model around the cell."""
