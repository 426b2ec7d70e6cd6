"""Benchmarks. `xlstm7b bench SUBJECT` runs the file `SUBJECT.py`."""
