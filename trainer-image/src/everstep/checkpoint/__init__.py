"""Checkpoints that are always good: saved beside training, verified on load, chosen by checksum.

A folder for each concern; imports between them point one way (`pyproject.toml`), and all may use `errors` and `events`.
No launching, no cluster. Importing this package imports neither torch nor a store's client: the writer process must
start in milliseconds and never carry torch.
"""
