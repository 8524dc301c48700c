"""Training of one trial: trainer, loop, engine (DeepSpeed), checkpoints, images and progress."""
