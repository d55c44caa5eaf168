"""Replica slots: copies of a node's slots in the memory of another node, and what is read from there.

The protocol between nodes belongs here. When a copy is due is the writer's decision; what is read, that of `restore`.
"""
