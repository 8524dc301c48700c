"""The attention modules and the residual block that contains one."""

from san.nn.attention import PairwiseAttention, PatchwiseAttention, ScalarAttention, SelfAttention, attention_weights
from san.nn.block import SelfAttentionBlock
from san.nn.folding import fold
from san.nn.relation import register_relation

__all__ = [
    "PairwiseAttention",
    "PatchwiseAttention",
    "ScalarAttention",
    "SelfAttention",
    "SelfAttentionBlock",
    "attention_weights",
    "fold",
    "register_relation",
]
