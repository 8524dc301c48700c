"""The command `san`, with one file for each group of commands."""

from experiments.cli.commands import cli, main

__all__ = ["cli", "main"]
