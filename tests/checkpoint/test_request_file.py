"""A checkpoint that the job's leader asks for is saved once, by all ranks, at their next step boundary."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch.distributed as dist

from everstep.checkpoint.catalog.candidates import list_candidates
from everstep.checkpoint.events import CheckpointEvent
from everstep.checkpoint.save import outside_requests
from everstep.checkpoint.save.outcomes import SaveFailed
from everstep.checkpoint.save.outside_requests import SaveRequest
from everstep.checkpoint.session.request_file import PERIOD, VARIABLE, OutsideRequest, RequestFile
from everstep.checkpoint.store.posix import PosixStore
from tests.agent.laptop import Laptop
from tests.checkpoint.ranks import run
from tests.checkpoint.sessions import Model, session, steps_in, train

pytestmark = pytest.mark.torch


def ask(path: Path, name: str, seconds: float | None = 60.0) -> None:
    """As an agent writes it."""
    deadline = None if seconds is None else time.time() + seconds
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"id": name, "deadline": deadline}))
    fresh.replace(path)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the request file, which this process's agent would have named."""
    path = tmp_path / "checkpoint-request.json"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def test_training_saves_once_for_a_request_and_goes_on(
    folder: Path, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody stops it: the node stays after all."""
    monkeypatch.setattr(outside_requests, "HOLD_SECONDS", 0.1)
    model = Model()
    with session(folder, every="1h") as ckpt:
        ckpt.track(model=model)
        train(ckpt, model, 5)
        ask(asked, "goes on")
        train(ckpt, model, 400, pause=0.01)
    assert len(steps_in(folder)) == 1
    assert 5 < steps_in(folder)[0] < 400


def test_a_request_that_meets_no_boundary_any_more_fails_no_job(folder: Path, asked: Path) -> None:
    """Nobody in the script has asked, and its last step may be the one before the node goes."""
    model = Model()
    with session(folder, every="1h") as ckpt:
        ckpt.track(model=model)
        train(ckpt, model, 3)
        ask(asked, "meets nothing")
        time.sleep(PERIOD)
        train(ckpt, model, 4)


def test_after_the_save_training_holds_until_it_is_stopped_if_the_node_goes(folder: Path, asked: Path) -> None:
    class Stopped(Exception):
        """As the agent's TERM, to a script that handles it."""

    def stop(*_: object) -> None:
        raise Stopped

    model = Model()
    ckpt = session(folder, every="1h")
    ckpt.track(model=model)
    train(ckpt, model, 5)
    ask(asked, "holds")

    def stop_soon(_: CheckpointEvent) -> None:
        signal.alarm(1)

    ckpt.on("saved", stop_soon)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        with pytest.raises(Stopped):
            train(ckpt, model, 100_000, pause=0.01)
    finally:
        signal.signal(signal.SIGALRM, before)
        ckpt.close(wait=False)
    assert steps_in(folder) == [model.at], "nothing was trained after what was saved"


def test_training_that_holds_goes_on_to_its_own_end_when_it_is_stopped(folder: Path, asked: Path) -> None:
    """A handler of TERM that makes a note of it ends the loop after the step in which it is."""
    model = Model()
    with session(folder, every="1h") as ckpt:
        ckpt.track(model=model)
        train(ckpt, model, 5)
        ask(asked, "ends")
        ckpt.on("saved", lambda _: asked.unlink())  # as the agent does with the TERM
        began = time.monotonic()
        train(ckpt, model, 400, pause=0.01)
        assert time.monotonic() - began < outside_requests.HOLD_SECONDS
    assert len(steps_in(folder)) == 1


def test_without_a_deadline_training_does_not_hold(folder: Path, asked: Path) -> None:
    model = Model()
    with session(folder, every="1h") as ckpt:
        ckpt.track(model=model)
        train(ckpt, model, 5)
        ask(asked, "does not hold", None)
        began = time.monotonic()
        train(ckpt, model, 400, pause=0.01)
        assert time.monotonic() - began < outside_requests.HOLD_SECONDS
    assert len(steps_in(folder)) == 1


def test_a_request_that_is_too_late_takes_nothing_from_the_scripts_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script's has no limit, and is not dropped with the other."""
    model = Model()
    with session(folder, every="1h") as ckpt:
        ckpt.track(model=model)
        train(ckpt, model, 5)
        ckpt.request()
        with monkeypatch.context() as late:
            late.setattr(RequestFile, "take", lambda _: OutsideRequest("too late at the next boundary", 1e-6))
            train(ckpt, model, 6)
        train(ckpt, model, 200, pause=0.01)
    assert len(steps_in(folder)) == 1


@pytest.mark.parametrize("is_first", [True, False])
def test_requests_that_come_together_keep_the_longest_time_and_the_hold(is_first: bool) -> None:
    now = time.monotonic()
    own, outside = SaveRequest(None), SaveRequest(now + 5, hold_until=now + 5)
    joined = own.join(outside) if is_first else outside.join(own)
    assert joined == SaveRequest(None, hold_until=now + 5)
    assert SaveRequest(now + 9).join(outside) == SaveRequest(now + 9, hold_until=now + 5)
    told = SaveRequest.read_note(joined.write_note(), looked=now)
    assert told.until is None
    assert told.hold_until == pytest.approx(now + 5, abs=1)


def test_a_save_that_fails_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(seconds: float) -> None:
        assert seconds == 60
        raise SaveFailed("the store is gone")

    phases: list[object] = []
    monkeypatch.setattr(outside_requests, "HOLD_SECONDS", float("inf"))
    progress = sys.modules["everstep.progress"]
    monkeypatch.setattr(progress, "_phase", "train")
    monkeypatch.setattr(progress, "report_checkpoint", lambda phase: phases.append(phase))
    outside_requests.hold_training(wait, 60, lambda: False)
    assert phases == ["checkpoint", "train"], "to hold is no hang"


def test_each_session_of_a_process_saves_for_a_request_and_none_holds_up_another(tmp_path: Path, asked: Path) -> None:
    models = [Model(), Model()]
    with session(tmp_path / "actor", every="1h") as actor, session(tmp_path / "critic", every="1h") as critic:
        for ckpt, model in zip((actor, critic), models, strict=True):
            ckpt.track(model=model)
            train(ckpt, model, 3)
        ask(asked, "of both")
        began = time.monotonic()
        for step in range(4, 300):
            time.sleep(0.01)
            train(actor, models[0], step)
            train(critic, models[1], step)
        assert time.monotonic() - began < outside_requests.HOLD_SECONDS
    assert [len(steps_in(tmp_path / name)) for name in ("actor", "critic")] == [1, 1]


@pytest.mark.parametrize("policy", ["wait", "queue"])
def test_a_request_whose_time_passes_behind_an_earlier_save_is_dropped_and_holds_training_no_longer(
    folder: Path, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    model = Model()
    with session(folder, every="1h", policy=policy, commit_timeout=60.0) as ckpt:
        ckpt.on("stalled", lambda event: told.append(event.why))
        ckpt.track(model=model)
        train(ckpt, model, 1)
        with monkeypatch.context() as slow:
            # As far as rank 0 knows: two that are on their way to a store that takes its time.
            outcomes = type(ckpt._claimed()._outcomes)
            slow.setattr(outcomes, "in_the_way", [None, None])
            ckpt.request(deadline=1.0)
            began = time.monotonic()
            train(ckpt, model, 3)
            assert time.monotonic() - began < 30
            time.sleep(1.0)
            train(ckpt, model, 5)
        train(ckpt, model, 200, pause=0.01)
    assert [why for why in told if "cannot be stored" in why]
    assert steps_in(folder) == []


def asks_for_two(rank: int, folder: Path, path: Path) -> None:
    os.environ[VARIABLE] = str(path)
    outside_requests.HOLD_SECONDS = 0.5
    model = Model()
    with session(folder, every="1h") as ckpt:
        ckpt.track(model=model)
        for step in range(1, 500):
            if rank == 0 and step == 3:
                ask(path, "of all ranks")
            model.at = step
            ckpt.step(step)
            time.sleep(0.005)
            dist.barrier()


def test_all_ranks_save_one_checkpoint_for_one_request(folder: Path, tmp_path: Path) -> None:
    run(2, asks_for_two, folder, tmp_path / "request")
    assert len(steps_in(folder)) == 1


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_file_is_looked_at_once_a_second_and_each_id_is_taken_once(tmp_path: Path) -> None:
    path, clock = tmp_path / "request", Clock()
    file = RequestFile(path, clock)
    assert file.take() is None
    ask(path, "first", None)
    assert file.take() is None, "it was looked at in this second"
    clock.now += PERIOD
    assert file.take() == OutsideRequest("first", None)
    clock.now += PERIOD
    assert file.take() is None
    ask(path, "first", None)
    clock.now += PERIOD
    assert file.take() is None, "the same request, written again"
    assert RequestFile(path, clock).take() is None, "nor does a later session of this process ask again"
    ask(path, "second")
    clock.now += PERIOD
    taken = file.take()
    assert taken is not None
    assert taken.seconds is not None
    assert 0 < taken.seconds <= 60


def test_a_request_is_over_when_its_file_is_gone_and_not_before_it_has_come(tmp_path: Path) -> None:
    """Agents of other nodes may write theirs a little later."""
    path = tmp_path / "request"
    file = RequestFile(path)
    assert not file.is_gone()
    ask(path, "first")
    assert not file.is_gone()
    path.unlink()
    assert file.is_gone()
    assert not RequestFile(None).is_gone()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"id": "x"}', '{"id": "y", "deadline": "soon"}'])
def test_a_file_that_cannot_be_read_asks_for_nothing(tmp_path: Path, content: str) -> None:
    path = tmp_path / "request"
    path.write_text(content)
    assert RequestFile(path).take() is None


def test_a_request_whose_time_is_over_asks_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "request"
    ask(path, "late", -1.0)
    assert RequestFile(path).take() is None


def test_without_an_agent_nothing_is_looked_at() -> None:
    assert RequestFile.from_environment({}).take() is None


TRAINS = """
import os, sys, time, torch, torch.distributed as dist, everstep
dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.zeros(1000))
times = everstep.TimeOptions(linger=5.0)
with everstep.checkpointer(sys.argv[1], every="1h", times=times) as checkpoints:
    step = checkpoints.restore(weight=weight.data).step
    print("begins at", step, "with", f"{weight.data[0].item():g}", flush=True)
    while step < 100_000:
        step += 1
        weight.data += 1
        everstep.progress(3 * step)
        checkpoints.step(step)
        time.sleep(0.02)
"""


@pytest.mark.timeout(180)
def test_a_leader_that_is_asked_has_its_ranks_save_and_the_next_generation_begins_there(tmp_path: Path) -> None:
    """Two agents, a process each, and all between the operator's command and the committed checkpoint. What the ranks
    report as their progress counts the batches of each step."""
    store = tmp_path / "store"
    command = [sys.executable, "-c", TRAINS, str(store)]

    def steps() -> list[int]:
        return [key.step for key in list_candidates(PosixStore(store))] if store.exists() else []

    def has_trained(state: dict[str, Any]) -> bool:
        return bool(((state["progress"] or {}).get("step") or 0) > 60)

    environ = {"EVERSTEP_CHECKPOINT_MEMORY": str(tmp_path / "memory")}
    with Laptop(tmp_path / "job", command, nodes=2, environ=environ) as job:
        trained = job.until(has_trained, "ranks train")["progress"]["step"]
        assert steps() == []
        job.client().checkpoint(1, "n1", 60)
        end = time.monotonic() + 60
        while not steps():
            assert time.monotonic() < end, "no checkpoint"
            time.sleep(0.05)
        (saved,) = steps()
        assert 3 * saved >= trained
        told = job.until(lambda state: state["checkpointRequest"]["savedStep"] is not None, "the leader knows")
        assert told["checkpointRequest"]["savedStep"] == saved
        assert told["progress"]["step"] == 3 * saved, "nothing is trained that would be lost"
        assert job.client().state()["generation"] == 1
        job.kill(1)
        job.start(1)
        job.introduce()
        job.until(lambda state: state["phase"] == "running" and state["generation"] == 2, "ranks run again")
        end = time.monotonic() + 60
        while f"begins at {saved} with {saved}" not in job.log(0):
            assert time.monotonic() < end, job.log(0)
            time.sleep(0.05)
