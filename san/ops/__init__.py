"""Operators on footprints: the relation and the aggregation of vector self-attention."""

from san.ops.functional import Backend, aggregation, backend, subtraction, unfold

__all__ = ["Backend", "aggregation", "backend", "subtraction", "unfold"]
