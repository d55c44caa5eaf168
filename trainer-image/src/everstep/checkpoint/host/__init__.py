"""Services of this machine for any process: available memory, absolute paths, folders that appear whole or not, what
signals' handlers have raised, and threads.

Nothing here knows what a checkpoint, a rank or a store is.
"""
