"""The schemas of grids and trials, and how a grid expands to trials."""
