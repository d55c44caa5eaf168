"""The object that a training script calls: `Checkpointer`, its arguments, and a run's claim on its store and nodes.

`checkpointer` is the way in. How a save or a restore works is not decided here.
"""
