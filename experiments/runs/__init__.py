"""Where runs are stored, and which process may write there."""
