"""Coordination of all ranks of a job, the same for checkpoints and pipelines: groups, a key-value store, liveness.

Here belongs what every rank does alike, and how a rank that does not is named. What the ranks agree on (a checkpoint, a
batch, a plan) belongs to the library that asks; nothing here imports one. `errors` and `heartbeat` need no torch.
"""
