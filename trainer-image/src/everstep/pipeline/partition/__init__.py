"""Choose the stage of each node: near-optimal for time, memory and links together, with a proof of how near.

The search and its certificate belong here: no torch. numpy is imported by the modules that search.
"""
