"""Answers: the table and the plots of a grid, ours beside the paper's."""
