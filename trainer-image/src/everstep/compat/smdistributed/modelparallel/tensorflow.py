"""Refused: everstep runs pipelines of PyTorch models."""

raise ImportError(
    "smdistributed.modelparallel.tensorflow is not offered: everstep runs pipelines of PyTorch models, "
    "see smdistributed.modelparallel.torch"
)
