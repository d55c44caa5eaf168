"""A training that knows nothing of everstep is carried over a kill by commands that are run beside it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

joblib = pytest.importorskip("joblib", reason="scikit-learn is in the environment of the torch tests")
pytest.importorskip("sklearn")

from everstep.checkpoint.catalog.candidates import list_candidates  # noqa: E402
from everstep.checkpoint.publish import folder  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).with_name("sklearn_training.py")
STEPS, PAUSED, KILLED = 12, 5, 8


def training(out: Path, *disturbed: int) -> subprocess.Popen[bytes]:
    out.mkdir(exist_ok=True)
    command = [sys.executable, str(SCRIPT), str(out), str(STEPS), *map(str, disturbed)]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


@contextmanager
def watched(out: Path, store: Path) -> Iterator[None]:
    command = ["checkpoint", "publish", str(out), str(store), "--watch", "--marker", "DONE", "--keep-last", "2"]
    watcher = subprocess.Popen([sys.executable, "-m", "everstep.cli", *command])
    try:
        yield
        watcher.send_signal(signal.SIGTERM)
        assert watcher.wait(60) == 0
    finally:
        watcher.kill()
        watcher.wait()


def published(store: Path, scratch: Path) -> str | None:
    """The step of the newest folder in the store."""
    found = PosixStore(store)
    if not list_candidates(found):
        return None
    folder.restore_folder(found, scratch, replace=True)
    return (scratch / "DONE").read_text()


def test_a_scikit_learn_training_goes_on_after_a_kill(tmp_path: Path) -> None:
    straight = training(tmp_path / "straight")
    assert straight.wait(60) == 0
    out, store = tmp_path / "out", tmp_path / "store"
    out.mkdir()
    with watched(out, store):
        killed = training(out, PAUSED, KILLED)
        end = time.monotonic() + 60
        while published(store, tmp_path / "seen") != str(PAUSED):
            assert time.monotonic() < end, "the step at which it waits is not published"
            time.sleep(0.1)
        killed.communicate(b"\n", 60)
        assert killed.returncode == -signal.SIGKILL
    shutil.rmtree(out)  # its node is gone; and half a model would have been in it
    restore = [sys.executable, "-m", "everstep.cli", "checkpoint", "restore", str(store), str(out)]
    subprocess.run(restore, check=True, timeout=60)
    _, trained = joblib.load(out / "model.joblib")
    assert PAUSED <= trained < KILLED
    assert training(out).wait(60) == 0
    assert weights(out) == weights(tmp_path / "straight")


def weights(out: Path) -> Any:
    model, trained = joblib.load(out / "model.joblib")
    return trained, model.t_, model.coef_.tobytes(), model.intercept_.tobytes()
