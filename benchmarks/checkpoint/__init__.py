"""Measures the cost of saving and restoring, beside the plain copy, write or read of the same bytes in the same run.

One file for each side: `saving` (stall, write), `restoring` (cold, warm, node, peer), `training` (train-cost); `floors`
are the plain arms, `state` what is saved, `wire` the other node. Everything of one row alternates, so that a drift of
the machine hits all arms.
"""
