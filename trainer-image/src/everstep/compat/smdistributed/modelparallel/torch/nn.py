"""`smp.nn`: layers for tensor parallelism, which are not offered."""

from __future__ import annotations

from everstep.compat.smdistributed.modelparallel.torch.refused import Refused

DistributedLinear = Refused("nn.DistributedLinear")
DistributedEmbedding = Refused("nn.DistributedEmbedding")
DistributedTransformer = Refused("nn.DistributedTransformer")
DistributedTransformerLMHead = Refused("nn.DistributedTransformerLMHead")
DistributedTransformerLayer = Refused("nn.DistributedTransformerLayer")
DistributedAttentionLayer = Refused("nn.DistributedAttentionLayer")
DistributedTransformerOutputLayer = Refused("nn.DistributedTransformerOutputLayer")
