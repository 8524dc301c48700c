"""One training run: engine (DeepSpeed), loop, metrics, checkpoint."""
