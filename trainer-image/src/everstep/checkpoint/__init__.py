"""Checkpoints that are always good: saved beside training, verified on load, chosen by checksum.

Here belong the format, the stores and the rules that hold over any store; no launching, no cluster. Importing this
package imports neither torch nor a store's client: the writer process must start in milliseconds and never carry torch.
"""
