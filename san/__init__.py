"""Self-attention networks for image recognition: operators, attention modules, models and their complexity.

Source: Zhao, Jia, Koltun, "Exploring Self-attention for Image Recognition", CVPR 2020 (arXiv:2004.13621). Importing it needs
only torch.
"""

from san import ops
from san.complexity import Complexity, complexity
from san.models import (
    CheckpointError,
    create_model,
    list_models,
    load_checkpoint,
    load_released_checkpoint,
    register_model,
    released_state_dict,
    save_checkpoint,
    save_released_checkpoint,
)
from san.nn import PairwiseAttention, PatchwiseAttention, ScalarAttention, attention_weights, fold, register_relation

__version__ = "0.1.0"  # pyproject.toml reads it here

__all__ = [
    "CheckpointError",
    "Complexity",
    "PairwiseAttention",
    "PatchwiseAttention",
    "ScalarAttention",
    "attention_weights",
    "complexity",
    "create_model",
    "fold",
    "list_models",
    "load_checkpoint",
    "load_released_checkpoint",
    "ops",
    "register_model",
    "register_relation",
    "released_state_dict",
    "save_checkpoint",
    "save_released_checkpoint",
]
