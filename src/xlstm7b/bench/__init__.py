"""Measurements: this package beside its peers, in one run."""
