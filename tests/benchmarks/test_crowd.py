"""The crowd itself, small: it must tell a leader that cannot take everybody from one that can."""

from __future__ import annotations

import pytest

from benchmarks import crowd


def test_a_crowd_of_several_processes_joins_one_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd, "AGENTS_PER_PROCESS", 4)
    told = crowd.gather(8)
    assert (told.joined, told.generation, told.restarted) == (8, 1, 8)
    assert min(told.seconds, told.restart_seconds, told.leader_bytes, told.heartbeat) > 0
