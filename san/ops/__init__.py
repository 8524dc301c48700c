"""Operators on footprints: the relation and the aggregation of vector self-attention."""

from san.ops.functional import Backend, aggregation, backend, dot, hadamard, subtraction, summation, unfold

__all__ = ["Backend", "aggregation", "backend", "dot", "hadamard", "subtraction", "summation", "unfold"]
