"""What pipelines cost beside what they must: closed forms, torch's pipelines on the same split, other splits.

One file for each kind of row: `schedules` (bubble-*, vs-torch-*), `interpreter`, `memory`, `auto`; `ranks` runs real
processes, `chain` is what they compute. `split` and `baselines` make the table of splits, which measures nothing.
"""
