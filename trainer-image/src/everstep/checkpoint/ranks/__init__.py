"""Communication of the ranks of one run: collectives, a key-value store, success or failure alike, their topology.

Nothing here knows what a checkpoint is: what is agreed on belongs to the rooms that agree.
"""
