"""The world outside: the API server, its watch, the leaders of jobs; and the queue of what to look at next.

Belongs here: input and output, retries, caches. Does not belong here: a decision about a job; those are in `plan`.
"""
