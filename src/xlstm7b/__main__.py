"""`python -m xlstm7b …`: the same as the console script `xlstm7b …`."""

from xlstm7b.cli import main

main()
