"""Services of Python, the kernel and the GPU driver: clocks, threads, processes, memory, devices.

Here belongs what would serve any process 1. Nothing here knows of jobs, ranks, messages or leaders.
"""
