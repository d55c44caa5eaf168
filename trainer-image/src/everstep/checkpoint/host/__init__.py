"""Services of this machine for any process: available memory, absolute paths, folders that appear whole or not, and
what signals' handlers have raised.

Nothing here knows what a checkpoint, a rank or a store is.
"""
