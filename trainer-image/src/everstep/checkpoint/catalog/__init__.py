"""The checkpoints that a store holds: listed, read, verified, selected, leased. Without torch.

What changes a store (commit, removal) belongs to `publish` and `retention`; what needs ranks or objects, to `restore`.
"""
