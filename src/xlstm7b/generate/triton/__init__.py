"""Kernels of generation: one row times the weights, few rows, and what is left between products."""
