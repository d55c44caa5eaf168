"""Schedules as data: who computes and tells what in which order; made, lowered, proven, simulated and drawn.

Here belongs what can be said of a pipeline without running it. No torch; what runs a schedule is the engine.
"""
