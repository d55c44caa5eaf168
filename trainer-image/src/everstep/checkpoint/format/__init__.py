"""The bytes of a checkpoint: keys, manifests, the index, packed values, checksums. Pure, without torch.

No store, no clock and no rank: whatever reads or writes files belongs to the rooms above.
"""
