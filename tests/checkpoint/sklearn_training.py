"""A scikit-learn training that knows nothing of everstep: `python sklearn_training.py FOLDER STEPS [PAUSE KILL]`.

It goes on from what is in FOLDER and dumps its model there after each step. It waits for a line on its standard input
after step PAUSE; at step KILL it is killed in the middle of a dump.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path

import joblib
import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier


def main() -> None:
    folder, steps, *disturbed = sys.argv[1:]
    pause, kill = map(int, disturbed or (-1, -1))
    data, target = load_digits(return_X_y=True)
    saved, done = Path(folder) / "model.joblib", Path(folder) / "DONE"
    model, trained = joblib.load(saved) if saved.exists() else (SGDClassifier(random_state=0), 0)
    for step in range(trained + 1, int(steps) + 1):
        batch = np.random.default_rng(step).integers(len(data), size=64)
        model.partial_fit(data[batch] / 16, target[batch], classes=range(10))
        dump = io.BytesIO()
        joblib.dump((model, step), dump)
        done.unlink(missing_ok=True)
        if step == kill:
            saved.write_bytes(dump.getvalue()[: len(dump.getvalue()) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        saved.write_bytes(dump.getvalue())
        done.write_text(str(step))
        if step == pause:
            sys.stdin.readline()


if __name__ == "__main__":
    main()
