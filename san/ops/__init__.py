"""Operators on footprints: the relation and the aggregation of vector self-attention.

Both as one, which the modules of `san.nn` use where they can, is `san.ops.fused`.
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
