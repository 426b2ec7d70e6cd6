"""Quantised weights: their schemes, how they are stored, and how they are computed from floats."""
