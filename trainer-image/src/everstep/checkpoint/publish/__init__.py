"""The steps that make a checkpoint: attempts, the fence and the commit; folders that one process publishes alone.

Here is all that adds a checkpoint to a store. Slots, ranks and tensors are none of it.
"""
