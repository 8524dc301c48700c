"""Operators on footprints: the relations and the aggregation of self-attention.

`san.ops.fused` has fused operators for the modules of `san.nn`.
"""

from san.ops.functional import Backend, aggregation, backend, dot, hadamard, subtraction, summation, unfold

__all__ = [
    "Backend",
    "aggregation",
    "backend",
    "dot",
    "hadamard",
    "subtraction",
    "summation",
    "unfold",
]
