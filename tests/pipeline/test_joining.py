"""From the call of `pipeline` to its end, all know which process does otherwise than the others, and how."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from everstep.coordination.errors import RankLost  # noqa: E402
from everstep.pipeline import building, joining, pipeline, prepare  # noqa: E402
from everstep.pipeline.engine.zero import ShardedOptimizer  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.schedules import parse_schedule  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.long_sweeps import only_in_long_sweeps  # noqa: E402
from tests.pipeline.grouping import group_options  # noqa: E402
from tests.pipeline.models import squares  # noqa: E402

pytestmark = pytest.mark.torch

TIMEOUT = 2.0
X, Y = torch.ones(4, 4), torch.zeros(4, 4)


def model(width: int = 4) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4))


def made(loss: Any = squares, of: Any = None, **how: Any) -> Any:
    usual: dict[str, Any] = {"costs": "counted", "schedule": "1f1b", "microbatches": 2, "heartbeat": TIMEOUT}
    return pipeline(model() if of is None else of, X, loss, **group_options(**usual | {"timeout": 60.0} | how))


def _otherwise(rank: int) -> list[str]:
    told = []
    with torch.device("meta"):
        empty = model()
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"clip": 1.0}, {}),
        ({"seed": 1}, {"seed": 2}),
        ({"stages": 2}, {"stages": 1}),
        ({"of": model(5)}, {"of": model(6)}),
        ({"of": model()}, {"of": model().eval()}),
        ({"heartbeat": None}, {}),
        ({"targets": X}, {}),
        ({"of": empty, "weights": model().state_dict()}, {"of": empty, "weights": {}}),
    ]
    for case in cases:
        with pytest.raises(PipelineError) as caught:
            made(**case[rank])
        told.append(str(caught.value))
    return told


def test_processes_that_call_it_in_different_ways_are_all_told_how_they_differ() -> None:
    here, there = ranks.run(2, _otherwise)
    assert here == there
    clip, seed, stages, shapes, modes, heartbeat, targets, weights = here
    assert clip == ("the ranks do not agree on clip: 1.0 on rank 0, None on rank 1; all must call pipeline() alike")
    assert "seed: 1 on rank 0, 2 on rank 1" in seed
    assert "stages: 2 on rank 0, 1 on rank 1" in stages
    assert "the model's parameters" in shapes
    assert "the modes of its modules" in modes
    assert "heartbeat is None on some" in heartbeat
    assert "targets: 'given' on rank 0, None on rank 1" in targets
    assert weights.startswith("rank 1: ")


def _refused(rank: int) -> list[str]:
    told = []
    cases: list[dict[str, Any]] = [
        {"schedule": parse_schedule("0F0 0F1 0B0\n1F0 1F1 1B0 1B1")},
        {"schedule": parse_schedule("0F0 1F0 1B0 0B0\n-")},
        {"schedule": parse_schedule("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0")},
    ]
    for how in cases:
        with pytest.raises(PipelineError) as caught:
            made(**how)
        told.append(str(caught.value))
    return told


def test_schedules_that_cannot_be_are_refused_with_what_is_wrong() -> None:
    here, there = ranks.run(2, _refused)
    assert here == there
    lacking, idle, stuck = here
    assert lacking == "schedule file: rank 0: 0B1 is missing"
    assert idle == "schedule file: rank 1 has no stage; each must have one"
    assert "comes to a stand: rank 0 at 0B0 (action 1) waits for" in stuck


def _one_after_another(rank: int) -> tuple[list[int], str]:
    """Connections and files that are open after each of some pipelines in one process."""
    found: list[int] = []
    for _ in range(5):
        with made(stages=1) as run:
            run.step(X, Y)
        # A ring ends when all have left it, which the last to leave does not wait for.
        for thread in [each for each in threading.enumerate() if each.name == "everstep-heartbeat"]:
            thread.join(10)
        found.append(len(list(Path("/proc/self/fd").iterdir())))
    with pytest.raises(PipelineError) as caught:
        run.step(X, Y)
    return found, str(caught.value)


def test_pipelines_one_after_another_leave_nothing_open() -> None:
    for found, closed in ranks.run(2, _one_after_another):
        # The last but one is kept by the name of the variable until the next is made.
        assert max(found[2:]) <= found[1] + 2
        assert closed == "the pipeline was closed: its modules are the model's again"


def _kept(rank: int, path: str) -> list[Any]:
    def plan_of(**how: Any) -> Any:
        with made(file=path if rank == 0 else None, schedule=None, microbatches=None, **how) as run:
            return run.plan

    first = plan_of()
    found: list[Any] = [plan_of() == first, plan_of(optimize="memory").objective]
    found.append(plan_of().objective)  # nothing else is asked for
    found.append(plan_of(memory=10**6).devices[0].memory)
    with pytest.raises(PipelineError) as caught:
        plan_of(memory=10)
    found.append(str(caught.value))
    with pytest.raises(PipelineError) as caught:
        plan_of(of=model(5))
    return [*found, str(caught.value)]


def test_a_kept_plan_counts_for_what_it_was_made_for(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    here, there = ranks.run(2, _kept, str(path))
    assert here == there
    same, objective, kept, memory, small, other = here
    assert same
    assert (objective, kept, memory) == ("memory", "memory", 10**6)
    assert "memory" in small
    assert other.startswith(f"{path}: the plan is for another model")
    assert other.endswith("delete the file to plan again")


def _fails(rank: int) -> tuple[str, float]:
    """The last stage's loss fails; its process goes on living, as one that uploads its logs does."""
    fails = False

    def loss(output: Any, targets: Any) -> Any:
        if fails:
            raise ZeroDivisionError("no words here")
        return squares(output, targets)

    began, told = 0.0, ""
    try:
        with made(loss) as run:
            run.step(X, Y)
            began, fails = time.monotonic(), True
            run.step(X, Y)
    except (RankLost, ZeroDivisionError) as error:
        told = str(error)
    took = time.monotonic() - began
    dist.barrier()
    return told, took


def test_a_process_that_fails_says_why_to_all_before_it_ends() -> None:
    (told, took), (own, _) = ranks.run(2, _fails)
    assert own == "no words here"
    assert told == "rank 1 failed: ZeroDivisionError: no words here; all ranks have to be started again"
    assert took < TIMEOUT


def _has_less(rank: int) -> str:
    """The data of one process end a step before those of the others."""
    try:
        with made() as run:
            for _ in range(2 if rank == 0 else 3):
                run.step(X, Y)
    except RankLost as lost:
        return str(lost)
    finally:
        dist.barrier()  # it lives on, and is not lost
    return ""


def test_a_process_whose_data_end_early_is_named_by_those_that_go_on() -> None:
    first, second = ranks.run(2, _has_less)
    assert first == ""
    assert second.startswith("rank 0 has left after 2 calls that all ranks make together")
    assert "and others have begun another" in second


def _leaves_before(rank: int, way: str) -> str:
    """One process ends in order after a step; the other goes on with what all do after one."""
    try:
        with made(data_parallel=2 if way == "sharded" else 1) as run:
            sharded = ShardedOptimizer(run.engine, lambda named: torch.optim.SGD(named.values(), lr=0.1))
            run.step(X, Y)
            if rank == 1 and way == "sharded":
                sharded.step()
            elif rank == 1:
                run.clip_grad_norm_(1.0)
    except RankLost as lost:
        return str(lost)
    finally:
        dist.barrier()
    return ""


@pytest.mark.parametrize("way", ["clip", "sharded"])
def test_a_process_that_leaves_before_others_clip_or_step_a_sharded_optimizer_is_named(way: str) -> None:
    first, second = ranks.run(2, _leaves_before, way)
    assert first == ""
    assert second.startswith("rank 0 has left after 1 calls that all ranks make together")


def _replicas(rank: int) -> tuple[list[str], float]:
    """One of two pipelines has a bad batch, then does something else."""
    told = []
    with made(stages=2) as run:
        bad = run.replica == 0
        with pytest.raises(PipelineError) as caught:
            run.step(X, Y[:3] if bad else Y)
        told.append(str(caught.value))
        with pytest.raises(PipelineError) as caught:
            run.evaluate(X, Y) if bad else run.step(X, Y)
        told.append(str(caught.value))
        loss = run.step(X, Y).loss  # all go on together
    return told, loss


def test_a_step_begins_on_all_replicas_or_on_none() -> None:
    found = ranks.run(4, _replicas)
    assert all(each == found[0] for each in found)
    (batch, purpose), loss = found[0]
    assert batch.startswith("replica 0: rank 0 has a batch of 4; rank 1 has a batch of 3: ")
    assert purpose.startswith(
        "replica 0 is at an evaluation after 0 steps; replica 1 is at a step after 0 steps: call "
    )
    total, count = squares(model()(X), Y)
    assert loss == pytest.approx((total / count).item(), rel=1e-5)


def _stands_still(rank: int, where: str, notes: str) -> tuple[int, float]:
    def act(*given: Any, **named: Any) -> Any:
        Path(notes).write_text(f"{os.getpid()} {time.time()}")
        os.kill(os.getpid(), signal.SIGSTOP)

    if rank == 1:
        setattr({"measure_graph": prepare, "materialise_stages": building}[where], where, act)
    with pytest.raises(RankLost) as caught:
        made(costs="measured")
    pid, then = Path(notes).read_text().split()
    took = time.time() - float(then)
    if rank == 2:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    return caught.value.ranks[0], took


@pytest.mark.parametrize("where", ["measure_graph", "materialise_stages"])
def test_a_process_that_stands_still_before_the_first_step_is_named_in_time(where: str, tmp_path: Path) -> None:
    first, _, last = ranks.run(3, _stands_still, where, str(tmp_path / "notes"), dies=[1])
    for named, took in (first, last):
        assert named == 1
        assert took < TIMEOUT + 1.0


def _dies_while_all_meet(rank: int, where: str) -> tuple[int, str, float]:
    def die(*given: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        if where == "before":
            die()
        setattr(
            *{"group": (dist, "new_group"), "connection": (dist, "barrier"), "ring": (joining, "Heartbeat")}[where], die
        )
    began = time.monotonic()
    with pytest.raises(RankLost) as caught:
        made(timeout=20.0)
    return caught.value.ranks[0], caught.value.why, time.monotonic() - began


@pytest.mark.parametrize("where", ["group", "connection", "ring", *only_in_long_sweeps("before")])
def test_a_process_that_dies_before_there_are_heartbeats_is_named_in_time(where: str) -> None:
    first, _, *others = ranks.run(4, _dies_while_all_meet, where, dies=[1])
    for named, why, took in (first, *others):
        assert named == 1
        assert why.startswith(
            "has not called pipeline() within 20 s" if where == "before" else "ended while pipeline()"
        )
        assert took < 100.0


def _elsewhere(rank: int, call: str) -> str:
    """The rank in the middle reads nothing of a batch, and is at another call than the others."""
    deep = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    try:
        with made(of=deep, stages=3, stage_of={"0": 0, "1": 1, "2": 2}) as run:
            run.step(X, Y)
            if rank != 1:
                run.step(X, Y)
            elif call == "clip":
                run.clip_grad_norm_(1.0)
            elif call == "evaluate":
                run.evaluate(X, Y)
            else:
                run.step(X, Y, last=False)
    except (RankLost, PipelineError) as error:
        return str(error)
    finally:
        dist.barrier()  # it lives on, and is not lost
    return ""


@pytest.mark.parametrize(
    ("call", "place"),
    [("clip", "a call of clip_grad_norm_"), ("evaluate", "an evaluation"), ("batch", "a batch of a step")],
)
def test_a_rank_that_reads_nothing_and_is_at_another_call_says_so_to_all(call: str, place: str) -> None:
    first, own, last = ranks.run(3, _elsewhere, call)
    assert own.startswith(f"rank 1 is at {place} after 1 steps; rank 0 is at a step after 1 steps: call ")
    assert first == last == f"rank 1 failed: PipelineError: {own}; all ranks have to be started again"
