"""Networks: SAN and its ResNet baselines, as rows of a registry, and files of their weights."""

from san.models.base import ModelSpec
from san.models.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from san.models.create import create_model, list_models
from san.models.modules import ModuleSpec
from san.models.registry import model_spec, register_model
from san.models.released import load_released_checkpoint, released_state_dict, save_released_checkpoint

__all__ = [
    "CheckpointError",
    "ModelSpec",
    "ModuleSpec",
    "create_model",
    "list_models",
    "load_checkpoint",
    "load_released_checkpoint",
    "model_spec",
    "register_model",
    "released_state_dict",
    "save_checkpoint",
    "save_released_checkpoint",
]
