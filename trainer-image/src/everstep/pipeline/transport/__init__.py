"""Connect the ranks of a pipeline: tensors in order for each directed pair, small messages, sums over groups.

`base` is the protocol that the engine knows; `inprocess` has ranks that are threads of one process, `gloo` has
processes. Nothing here knows of stages, schedules or gradients.
"""
