"""Operators on footprints: the relation and the aggregation of vector self-attention."""

from san.ops.functional import aggregation, backend, subtraction, unfold

__all__ = ["aggregation", "backend", "subtraction", "unfold"]
