"""Places where checkpoints are kept. A store knows names and bytes; it knows nothing of checkpoints.

`base` is what every store promises; each other file is one kind of store.
"""
