"""Checkpoints in other libraries' files and back: safetensors, Hugging Face folders, DCP folders, torch.save.

Here belongs what translates between a store and a foreign format, each by that format's own library, imported when it
is used. Nothing here is needed to save or restore.
"""
