"""The writer process, one for each node (`python -m everstep.checkpoint.writer`), and `control`, how ranks talk to it.

It outlives its ranks, starts in milliseconds and never imports torch. Nothing of `save` or `restore` is known here.
"""
