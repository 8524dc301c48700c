"""Reports: tables, plots and the page of a grid, with our results beside the paper's."""
