"""Measures pipelines beside what they must cost: closed forms, torch's pipelines on the same split, other splits.

One file for each kind of row: `schedules` (bubble-*, vs-torch-*), `interpreter`, `memory`, `auto`, `predicted`; `ranks`
runs real processes, `chain` and `models` are what they compute. `split` and `baselines` make the table of splits, which
measures nothing; `others` compares results, not times.
"""
