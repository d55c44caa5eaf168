"""Connect the ranks of a pipeline: tensors in order for each directed pair, small messages, sums over groups.

`base` is the protocol that the engine knows; `gloo` has ranks that are processes. Nothing here knows of
stages, schedules or gradients.
"""
