"""A save in the training process: when it is due, who writes what, the copy into a slot, and how it ended.

`save_coordinator` is the way in. What happens to a filled slot belongs to `writer`.
"""
