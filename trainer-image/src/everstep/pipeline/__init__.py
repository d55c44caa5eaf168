"""Pipelines: a model cut into stages, run by a schedule that was proven before, with the result of one process.

Here belong the graph, the schedules, the partition, the engine and its front end; no launching, no cluster. Importing
this package imports neither torch nor numpy: plans are made and drawn without them.
"""
