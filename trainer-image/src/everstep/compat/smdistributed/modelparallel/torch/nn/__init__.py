"""`smp.nn`: layers for tensor parallelism, which are not offered, and one that torch has."""

from __future__ import annotations

from torch.nn import LayerNorm as FusedLayerNorm

from everstep.compat.smdistributed.modelparallel.torch.nn.huggingface import gpt2  # noqa: F401 - reached by names
from everstep.compat.smdistributed.modelparallel.torch.refused import NotOfferedName

__all__ = ["FusedLayerNorm"]

DistributedLinear = NotOfferedName("nn.DistributedLinear")
DistributedEmbedding = NotOfferedName("nn.DistributedEmbedding")
DistributedTransformer = NotOfferedName("nn.DistributedTransformer")
DistributedTransformerLMHead = NotOfferedName("nn.DistributedTransformerLMHead")
DistributedTransformerLayer = NotOfferedName("nn.DistributedTransformerLayer")
DistributedAttentionLayer = NotOfferedName("nn.DistributedAttentionLayer")
DistributedTransformerOutputLayer = NotOfferedName("nn.DistributedTransformerOutputLayer")
FlashAttentionLayer = NotOfferedName("nn.FlashAttentionLayer")
