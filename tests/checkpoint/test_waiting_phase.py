"""A wait for the store is no hang: a rank says that it waits, and afterwards which phase its script is in."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
import everstep
from everstep.checkpoint.save.outcomes import SaveFailed
from tests.checkpoint.sessions import Model, session

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("phase", ["train", "eval"])
def test_who_waits_for_a_store_that_is_away_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    os.mkfifo(tmp_path / "progress")
    reader = os.open(tmp_path / "progress", os.O_RDWR | os.O_NONBLOCK)
    monkeypatch.setenv("EVERSTEP_PROGRESS", str(tmp_path / "progress"))
    monkeypatch.setattr(sys.modules["everstep.progress"], "_phase", "train")  # afterwards it is again what it was

    def list_phases() -> list[str]:
        words = os.read(reader, 1 << 16).decode().split()
        return [word for word in words if word.startswith("phase=")]

    store, away = tmp_path / "store", tmp_path / "away"
    with session(tmp_path, every="1h") as ckpt:
        ckpt.track(model=Model())
        ckpt.save(1)
        ckpt.wait()
        store.rename(away)
        ckpt.save(2)
        everstep.progress(2, phase=phase)
        list_phases()
        with pytest.raises(SaveFailed):
            ckpt.wait(0.2)
        assert list_phases() == ["phase=checkpoint", f"phase={phase}"]
        away.rename(store)
    assert list_phases() == ["phase=checkpoint", f"phase={phase}"], "the end of a session waits too"
    os.close(reader)
