"""The writer process, one for each node, and `control`, by which ranks start it and talk to it.

It outlives its ranks, starts in milliseconds and never imports torch. Nothing of `save` or `restore` is known here.
"""
