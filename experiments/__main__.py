"""`python -m experiments` is the command `san`."""

from experiments.cli import main

main()
