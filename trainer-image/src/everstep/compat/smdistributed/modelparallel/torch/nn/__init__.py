"""`smp.nn`: layers for tensor parallelism, which are not offered, and one that torch has."""

from __future__ import annotations

from torch.nn import LayerNorm as FusedLayerNorm

from everstep.compat.smdistributed.modelparallel.torch.nn.huggingface import gpt2  # noqa: F401 - reached by names
from everstep.compat.smdistributed.modelparallel.torch.refused import Refused

__all__ = ["FusedLayerNorm"]

DistributedLinear = Refused("nn.DistributedLinear")
DistributedEmbedding = Refused("nn.DistributedEmbedding")
DistributedTransformer = Refused("nn.DistributedTransformer")
DistributedTransformerLMHead = Refused("nn.DistributedTransformerLMHead")
DistributedTransformerLayer = Refused("nn.DistributedTransformerLayer")
DistributedAttentionLayer = Refused("nn.DistributedAttentionLayer")
DistributedTransformerOutputLayer = Refused("nn.DistributedTransformerOutputLayer")
FlashAttentionLayer = Refused("nn.FlashAttentionLayer")
