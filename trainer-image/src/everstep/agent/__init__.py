"""The agent: PID 1 of every training pod. Plain Python >= 3.9, standard library only, one event loop.

Here belongs what coordinates and supervises ranks; nothing that a user's script imports, nothing of the operator's.
"""
