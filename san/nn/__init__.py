"""Modules: attention of all kinds and the residual block around it."""

from san.nn.attention import PairwiseAttention, PatchwiseAttention, ScalarAttention, SelfAttention, attention_weights
from san.nn.block import GlobalAveragePool, SelfAttentionBlock

__all__ = [
    "GlobalAveragePool",
    "PairwiseAttention",
    "PatchwiseAttention",
    "ScalarAttention",
    "SelfAttention",
    "SelfAttentionBlock",
    "attention_weights",
]
