"""Runs a schedule: forward, backward in one or two parts, messages, reductions, with the mathematics of one process.

Here belong the interpreter of action lists and what must be exact in it: losses, ties, counts, clipping, random
numbers, running statistics, failures. How tensors travel is the transport's, what is computed the front end's.
"""
