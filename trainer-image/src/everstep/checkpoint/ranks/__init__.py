"""The ranks of a run: the group of them all, with the errors of this library, and the nodes that they share.

How ranks communicate belongs to `everstep.coordination`; what they agree on, to the rooms that agree.
"""
