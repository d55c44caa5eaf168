"""Two real ranks train with their checkpoints on a real S3 server, through faults and outages."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("torch")
import torch

import everstep
from everstep.checkpoint.catalog.candidates import list_candidates, verify_checkpoint
from everstep.checkpoint.errors import Missing
from everstep.checkpoint.session.checkpointer import SaveFailed
from everstep.checkpoint.store.base import open_store
from tests.checkpoint.faults import Chooser, Fault, FaultProxy, Request
from tests.checkpoint.grouping import group_session
from tests.checkpoint.ranks import run
from tests.checkpoint.s3_server import BUCKET, ENVIRONMENT
from tests.checkpoint.writers import until

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


def model(step: int) -> torch.nn.Linear:
    made = torch.nn.Linear(200, 100)
    torch.nn.init.constant_(made.weight, float(step))
    torch.nn.init.constant_(made.bias, float(-step))
    return made


def train(rank: int, url: str, memory: Path, last: int, **times: float) -> tuple[int, float, list[str]]:
    """Goes on from the newest to step `last`, saving at each; where it began, what it found, and what failed."""
    os.environ.update(ENVIRONMENT)
    made, failed = model(-1), []
    options: dict[str, Any] = {"options": {"read_timeout": 1.0}, "directory": memory, "linger": 1.0, "timeout": 60.0}
    with everstep.checkpointer(url, every_steps=1, policy="wait", **group_session(**options | times)) as ckpt:
        ckpt.on("failed", lambda event: failed.append(event.why))
        start = ckpt.restore(model=made)
        found = float(made.weight.mean())
        for step in range(start.step + 1, last + 1):
            torch.nn.init.constant_(made.weight, float(step))
            torch.nn.init.constant_(made.bias, float(-step))
            ckpt.step(step)
    return start.step, found, failed


def train_until_it_is_told(rank: int, url: str, memory: Path, last: int) -> tuple[int, float, list[str]] | str:
    try:
        return train(rank, url, memory, last, commit_timeout=20.0, linger=120.0)
    except SaveFailed as error:
        return str(error)


def now_and_then() -> Chooser:
    """Each fifth request is spoiled, in one way after the other."""
    kinds = list(Fault)

    def choose(number: int, _: Request) -> Fault | None:
        return kinds[number // 5 % len(kinds)] if number % 5 == 0 else None

    return choose


def through(proxy: FaultProxy, url: str) -> str:
    return f"s3://{BUCKET}{urlsplit(url).path}?endpoint={proxy.endpoint}"


def test_a_run_survives_a_store_that_fails_now_and_then(s3_url: str, proxy: FaultProxy, tmp_path: Path) -> None:
    proxy.begin(now_and_then())
    url = through(proxy, s3_url)
    first = run(2, train, url, tmp_path / "first", 4, timeout=120)
    assert [(start, failed) for start, _, failed in first] == [(0, []), (0, [])]
    store = open_store(s3_url)
    newest, *older = list_candidates(store)
    assert newest.step == 4
    verify_checkpoint(store, newest)
    for key in older:
        with contextlib.suppress(Missing):  # the writer still removes what is not kept
            verify_checkpoint(store, key)
    # On other machines: nothing is left in memory there.
    second = run(2, train, url, tmp_path / "second", 5, timeout=120)
    assert [(start, found) for start, found, _ in second] == [(4, 4.0), (4, 4.0)]
    assert len(proxy.requests) > 50


def test_a_store_that_is_gone_ends_no_training_and_leaves_the_last_good_one(
    s3_url: str, proxy: FaultProxy, folder: Path
) -> None:
    url = through(proxy, s3_url)
    run(2, train, url, folder / "memory of the first", 2, timeout=120)
    manifests = 0

    def gone_after_the_first_commit(_: int, request: Request) -> Fault | None:
        nonlocal manifests
        manifests += request.method == "PUT" and "/manifests/" in request.path
        return Fault.RESET if manifests > 2 else None

    proxy.begin(gone_after_the_first_commit)
    ends = run(2, train_until_it_is_told, url, folder / "memory of the second", 5, timeout=240)
    assert all(isinstance(end, str) for end in ends), ends
    store = open_store(s3_url)
    newest = list_candidates(store)[0]
    assert 2 < newest.step < 5
    verify_checkpoint(store, newest)
    proxy.begin()
    # The writer is still there, and stores what it has as soon as it can: its pauses have grown with the outage.
    until(lambda: list_candidates(store)[0].step == 5, "step 5 in the store", 100.0)
    third = run(2, train, url, folder / "memory of the third", 6, timeout=120)
    assert [(start, found) for start, found, _ in third] == [(5, 5.0), (5, 5.0)]


def saves_last_in_an_outage(rank: int, url: str, folder: Path) -> tuple[list[str], dict[str, Any]]:
    os.environ.update(ENVIRONMENT)
    failed: list[str] = []
    options: dict[str, Any] = {"options": {"read_timeout": 1.0}, "directory": folder / "memory", "linger": 1.0}
    with everstep.checkpointer(url, **group_session(timeout=100.0, commit_timeout=200.0, **options)) as ckpt:
        ckpt.on("failed", lambda event: failed.append(event.why))
        ckpt.on("stalled", lambda event: (folder / "it is known").touch() if "tried again" in event.why else None)
        made = model(1)
        ckpt.restore(model=made)
        ckpt.save(1)
        ckpt.wait()
        (folder / "outage").touch()
        ckpt.save(2)
    return failed, ckpt.metrics()


def test_a_store_that_is_unavailable_during_the_last_save_has_it_when_it_is_back(
    s3_url: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    def until_it_is_known(_: int, __: Request) -> Fault | None:
        return Fault.RESET if (tmp_path / "outage").exists() and not (tmp_path / "it is known").exists() else None

    proxy.begin(until_it_is_known)
    for failed, metrics in run(2, saves_last_in_an_outage, through(proxy, s3_url), tmp_path, timeout=240):
        assert failed == []
        assert (metrics["saved"], metrics["failed"]) == (2, 0)
    assert (tmp_path / "it is known").exists()
    store = open_store(s3_url)
    newest = list_candidates(store)[0]
    assert newest.step == 2
    verify_checkpoint(store, newest)
