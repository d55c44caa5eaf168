"""Which node goes to which stage: near-optimal for time, memory and links together, with a proof of how near.

Here belong the search and its certificate: no torch. numpy is imported by the modules that search; scipy only where a
mixed-integer programme is asked for.
"""
