"""The choice of checkpoints to keep, and the removal of all others: by a run (`retention`) or by hand (`pruning`).

Nothing else removes a checkpoint. When to do so, the callers decide.
"""
