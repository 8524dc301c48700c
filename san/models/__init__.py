"""Networks: SAN and its ResNet baselines, as rows of a registry."""

from san.models.registry import create_model, list_models, model_spec
from san.models.spec import ModelSpec

__all__ = ["ModelSpec", "create_model", "list_models", "model_spec"]
