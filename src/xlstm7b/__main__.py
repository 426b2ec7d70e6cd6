"""`python -m xlstm7b` is the same as the command `xlstm7b`."""

from xlstm7b.cli import main

main()
