"""One rank: its environment and files, its process and output, its progress, and why it ended.

Nothing here knows which other ranks there are, how a launcher starts them, or what a leader makes of their end.
"""
