"""Plans and executes what a grid lacks: trials to train and trained trials to measure."""
