"""The slots of a node's shared memory, which outlive its ranks: their files, locks and marks. Without torch.

When a slot is filled, stored or removed is decided by the writer process; how tensors get into one, by `save`.
"""
