"""Operators on footprints: the relation and the aggregation of vector self-attention, and both as one."""

from san.ops.functional import Backend, aggregation, backend, dot, fuses, hadamard, subtraction, summation, unfold
from san.ops.fused import LRL, Normalization, Statistics, norm_relu, norm_relu_, pairwise_attention, patchwise_attention

__all__ = [
    "LRL",
    "Backend",
    "Normalization",
    "Statistics",
    "aggregation",
    "backend",
    "dot",
    "fuses",
    "hadamard",
    "norm_relu",
    "norm_relu_",
    "pairwise_attention",
    "patchwise_attention",
    "subtraction",
    "summation",
    "unfold",
]
