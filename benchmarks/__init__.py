"""Measures how fast everstep is, always beside a floor of the same run.

A row is a ratio: ours over the floor, medians of arms that alternate. Absolute times of one machine mean nothing on
the next. Belongs here: arms, floors and the table. Does not: what must simply work (e2e/scenarios).
"""
