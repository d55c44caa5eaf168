"""Objects of a training run as named tensors and values, and back: one file for each kind of object.

Here belongs what a model, an optimizer or a plain value is to a checkpoint; no store, no other rank. All but `names`
need torch; `flat` is the way in.
"""
