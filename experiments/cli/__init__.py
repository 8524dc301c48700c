"""The command `san`, with one file for each group of commands."""
