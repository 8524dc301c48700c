"""Modules: attention of both kinds and the residual block around it."""

from san.nn.attention import ATTENTION, PairwiseAttention, PatchwiseAttention, VectorAttention
from san.nn.block import SelfAttentionBlock

__all__ = ["ATTENTION", "PairwiseAttention", "PatchwiseAttention", "SelfAttentionBlock", "VectorAttention"]
