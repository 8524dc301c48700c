"""Evaluation of trained networks: accuracy, rotation and attack."""
