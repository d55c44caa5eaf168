"""A request for a checkpoint reaches every rank once, as a file that its agent writes."""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from everstep.agent.leader.commands import AskForCheckpoint
from everstep.agent.node.checkpoint_request import CheckpointRequestFile
from everstep.agent.node.fencing import FenceFile
from everstep.agent.ranks.events import RankProgressed
from everstep.agent.wire.checkpoint_request import CheckpointRequest
from everstep.agent.wire.http_client import RequestRejected
from everstep.agent.wire.protocol import RankProgress
from everstep.agent.wire.rank_checkpoint import RankCheckpoint
from everstep.cli.leader_client import LeaderClient
from everstep_operator.cluster.leader_poller import LeaderPoller
from everstep_operator.plan.actions import LeaderPoll
from everstep_operator.plan.leader_view import RequestedCheckpoint

from .bench import Bench, running
from .fakes import TOKEN, Agent, gang, until
from .laptop import Laptop

KEY = ("default", "digits")


def asks(bench: Bench) -> list[tuple[int, str, float | None]]:
    bench.take()
    asked = [c for c in bench.commands if isinstance(c, AskForCheckpoint)]
    return [(each.generation, each.request.id, each.request.seconds) for each in asked]


def request(bench: Bench, name: str = "n1", seconds: float | None = 120.0) -> Bench:
    bench.leader.request_checkpoint(bench.now, CheckpointRequest(name, seconds))
    return bench


def test_running_ranks_are_asked_once_for_each_id() -> None:
    bench = request(request(running()))
    assert asks(bench) == [(1, "n1", 120.0)]
    assert bench.leader.state()["checkpointRequest"] == {"id": "n1", "generation": 1, "savedStep": None}
    request(bench, "n2")
    assert [name for _, name, _ in asks(bench)] == ["n1", "n2"]


def test_ranks_that_do_not_run_yet_are_asked_when_they_do_with_what_is_left() -> None:
    bench = request(Bench().join_all())
    assert asks(bench) == []
    assert bench.leader.state()["checkpointRequest"] == {"id": "n1", "generation": 0, "savedStep": None}
    bench.now += 30
    bench.run()
    assert asks(bench) == [(1, "n1", 90.0)]


def test_a_generation_that_may_not_have_saved_hands_the_request_on_until_its_deadline() -> None:
    bench = request(running(max_backoff=0.0))
    bench.now += 10
    bench.fail(1, 3).clean().run()
    assert asks(bench) == [(1, "n1", 120.0), (2, "n1", 110.0)]
    bench.now += 110
    bench.fail(1, 3).clean().run()
    assert len(asks(bench)) == 2, "it is of no use any more"


def test_what_has_no_deadline_is_asked_of_one_generation() -> None:
    bench = request(running(max_backoff=0.0), seconds=None).fail(1, 3).clean().run()
    assert asks(bench) == [(1, "n1", None)]


def train(bench: Bench, step: int, saved: int | None = None) -> Bench:
    """Rank 0 tells of its step, and of the newest checkpoint."""
    told = RankProgress(0, step, checkpoint=None if saved is None else RankCheckpoint(checkpoint=saved))
    bench.leader.take_heartbeat(bench.now, 1, bench.leader.generation, [told])
    return bench


def saved_step(bench: Bench) -> int | None:
    found: int | None = bench.leader.state()["checkpointRequest"]["savedStep"]
    return found


def test_the_checkpoint_that_is_asked_for_is_none_of_a_step_before() -> None:
    bench = request(train(running(), 20, saved=10))
    assert saved_step(bench) is None
    train(bench, 22, saved=15)  # it was being stored when the request came
    assert saved_step(bench) is None
    version = bench.leader.version
    train(bench, 25, saved=23)
    assert saved_step(bench) == 23
    assert bench.leader.version > version, "the operator waits for it"
    train(bench, 40, saved=35)
    assert saved_step(bench) == 23
    request(bench, "n2")
    assert saved_step(bench) is None
    train(bench, 45, saved=41)
    assert saved_step(bench) == 41


def test_of_ranks_that_report_no_steps_the_next_checkpoint_is_the_one() -> None:
    bench = running()
    told = RankProgress(0, checkpoint=RankCheckpoint(checkpoint=10))
    bench.leader.take_heartbeat(bench.now, 1, 1, [told])
    request(bench)
    bench.leader.take_heartbeat(bench.now, 1, 1, [told])
    assert saved_step(bench) is None
    bench.leader.take_heartbeat(bench.now, 1, 1, [RankProgress(0, checkpoint=RankCheckpoint(checkpoint=11))])
    assert saved_step(bench) == 11


@pytest.mark.parametrize("trained", [None, 5000], ids=["a framework", "save() alone"])
def test_what_ranks_that_save_by_themselves_had_saved_before_is_not_what_is_asked_for(trained: int | None) -> None:
    """They report epochs, say, and their checkpoints count steps: the pods would leave for one that is long there."""
    bench = running()

    def train(epoch: int, saved: int) -> None:
        told = RankCheckpoint(checkpoint=saved, restored=0, trained_step=trained, takes_requests=0)
        bench.leader.take_heartbeat(bench.now, 1, 1, [RankProgress(0, epoch, checkpoint=told)])

    train(5, saved=5000)
    request(bench)
    train(6, saved=5000)
    assert saved_step(bench) is None
    train(6, saved=6000)
    assert saved_step(bench) == 6000


def test_ranks_that_count_otherwise_than_their_checkpoints_and_say_so_late_meet_the_request_too() -> None:
    """They report batches from the first one on, and their steps when the first one is done."""
    bench = train(running(), 80)
    request(bench)
    for step, saved in ((21, 20), (22, 20)):
        told = RankCheckpoint(checkpoint=saved, restored=20, trained_step=step, takes_requests=1)
        bench.leader.take_heartbeat(bench.now, 1, 1, [RankProgress(0, 4 * step, checkpoint=told)])
        assert saved_step(bench) is None
    told = RankCheckpoint(checkpoint=22, restored=20, trained_step=23, takes_requests=1)
    bench.leader.take_heartbeat(bench.now, 1, 1, [RankProgress(0, 92, checkpoint=told)])
    assert saved_step(bench) == 22


def test_a_generation_that_begins_further_back_may_meet_the_request_with_an_earlier_step() -> None:
    bench = request(train(running(max_backoff=0.0), 20, saved=10))
    bench.fail(1, 3).clean().run()
    train(bench, 12, saved=10)
    assert saved_step(bench) is None, "it is what they have begun from"
    train(bench, 14, saved=13)
    assert saved_step(bench) == 13


def test_an_ended_job_is_asked_for_nothing() -> None:
    bench = running(application_restarts=0).fail(1, 3).clean()
    assert bench.phase == "ended"
    assert asks(request(bench)) == []


def read(agent: Agent) -> dict[str, Any] | None:
    path = agent.fence.with_name("checkpoint-request.json")
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return found


async def test_every_node_has_the_request_until_the_next_generation(tmp_path: Path) -> None:
    async with gang(tmp_path, 3) as agents:
        leader, leading = agents[0].leader, agents[0].leading
        assert leader is not None
        assert leading is not None
        await until(lambda: leader.phase == "running")
        leader.request_checkpoint(agents[0].node._clock(), CheckpointRequest("n1", 60))
        leading._pump()
        await until(lambda: all(read(agent) for agent in agents))
        told = [read(agent) for agent in agents]
        assert [each and each["id"] for each in told] == ["n1"] * 3
        assert all(each and 0 < each["deadline"] - time.time() <= 60 for each in told)
        leader.request_checkpoint(agents[0].node._clock(), CheckpointRequest("n2", None))
        leading._pump()
        await until(lambda: all((said := read(agent)) and said["id"] == "n2" for agent in agents))
        agents[2].processes.exit(7)
        await until(lambda: leader.generation == 2 and leader.phase == "running")
        assert [read(agent) for agent in agents] == [None] * 3


async def test_a_request_that_cannot_be_written_ends_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with gang(tmp_path, 1) as agents:
        leader, leading = agents[0].leader, agents[0].leading
        assert leader is not None
        assert leading is not None
        await until(lambda: leader.phase == "running")
        agents[0].fence.with_name("checkpoint-request.json.new").mkdir()  # as good as a full disk
        leader.request_checkpoint(agents[0].node._clock(), CheckpointRequest("n1", 60))
        leading._pump()
        await until(lambda: "does not reach the ranks" in capfd.readouterr().err)
        assert leader.phase == "running"


async def test_the_operators_command_reaches_the_leader_and_its_state_says_so(tmp_path: Path) -> None:
    async with gang(tmp_path, 2) as agents:
        poller = LeaderPoller(lambda key, delay: None, fence_timeout=6)
        try:
            poller.ensure_polled(KEY, LeaderPoll(agents[0].address, "pod-a", 1, 1, "", 1), TOKEN)
            await until(lambda: (view := poller.view(KEY, "pod-a")) and view.phase == "running")
            for _ in range(3):
                poller.request_checkpoint(KEY, "n1", time.time() + 60)
            asked = RequestedCheckpoint("n1")
            await until(lambda: (view := poller.view(KEY, "pod-a")) and view.checkpoint_request == asked)
            trained = RankProgressed(1, 0, 12, None, "train", {}, RankCheckpoint(checkpoint=12))
            agents[0].node.emit(trained)
            saved = RequestedCheckpoint("n1", 12)
            await until(lambda: (view := poller.view(KEY, "pod-a")) and view.checkpoint_request == saved)
            await until(lambda: all(read(agent) for agent in agents))
        finally:
            await poller.close()


@pytest.mark.parametrize("name", ["", "x" * 65, "a\nb", 7])
@pytest.mark.parametrize("deadline", [60, None])
async def test_a_request_without_a_usable_id_is_rejected(tmp_path: Path, name: Any, deadline: float | None) -> None:
    with pytest.raises(ValueError, match="id must be"):
        CheckpointRequest.from_json({"id": name, "deadline": deadline}, seconds="deadline")


@pytest.mark.parametrize("deadline", [-1, "60", True, float("inf"), float("nan"), [60]])
def test_a_request_without_a_usable_deadline_is_rejected(deadline: Any) -> None:
    with pytest.raises(ValueError, match="deadline must be null or a number"):
        CheckpointRequest.from_json({"id": "n1", "deadline": deadline}, seconds="deadline")


WAITS = """
import json, os, time
path = os.environ["EVERSTEP_CHECKPOINT_REQUEST"]
while not os.path.exists(path):
    time.sleep(0.01)
said = json.load(open(path))
print("rank", os.environ["RANK"], "saves for", said["id"], "within", round(said["deadline"] - time.time()), flush=True)
"""


def test_ranks_of_real_agents_find_the_request_in_the_file_that_their_environment_names(tmp_path: Path) -> None:
    with Laptop(tmp_path, [sys.executable, "-c", WAITS], nodes=2, procs=2, zipped=True) as job:
        job.until(lambda state: state["phase"] == "running", "ranks run")
        client = job.client()
        with pytest.raises(RequestRejected, match="epoch"):
            client.checkpoint(7, "n1", 60)
        with pytest.raises(RequestRejected, match="deadline"):
            client.checkpoint(1, "n1", -1)
        client.checkpoint(1, "n1", 60)
        client.checkpoint(1, "n1", 60)
        state = job.until(lambda state: state["phase"] == "ended", "all ranks have seen it")
        assert state["checkpointRequest"] == {"id": "n1", "generation": 1, "savedStep": None}
        assert job.exit_codes() == [0, 0]
        said = "".join(job.log(index) for index in range(2))
    assert all(f"rank {rank} saves for n1 within 60" in said for rank in range(4)), said


SHELL = """
until [ -s "$EVERSTEP_CHECKPOINT_REQUEST" ]; do echo "step=6" > "$EVERSTEP_PROGRESS"; sleep 0.1; done
grep -o '"id": "[^"]*"' "$EVERSTEP_CHECKPOINT_REQUEST"
echo "step=7 checkpoint=7" > "$EVERSTEP_PROGRESS"
sleep 60
"""


def test_a_program_of_any_language_answers_the_request_by_a_word_of_its_progress(tmp_path: Path) -> None:
    with Laptop(tmp_path, ["sh", "-c", SHELL], nodes=1) as job:
        job.until(lambda state: bool(state["progress"]), "it trains")
        job.client().checkpoint(1, "n1", 60)
        state = job.until(lambda state: (state["checkpointRequest"] or {}).get("savedStep") is not None, "it has saved")
        assert state["checkpointRequest"] == {"id": "n1", "generation": 1, "savedStep": 7}
        assert '"id": "n1"' in job.log(0)


def test_nobody_without_the_token_asks_for_a_checkpoint(tmp_path: Path) -> None:
    with Laptop(tmp_path, [sys.executable, "-c", "import time; time.sleep(60)"], nodes=1) as job:
        job.client()
        stranger = LeaderClient(f"127.0.0.1:{job.ports[0]}", b"x" * 32)
        with pytest.raises(RequestRejected, match="401"):
            stranger.checkpoint(1, "n1", 60)


def test_ranks_of_another_user_can_read_the_request_and_the_fence_whatever_the_umask(tmp_path: Path) -> None:
    asked, fence = tmp_path / "checkpoint-request.json", tmp_path / "fence.json"
    before = os.umask(0o077)
    try:
        CheckpointRequestFile(asked).write(CheckpointRequest("n1", None))
        FenceFile(fence, 0).write(1, 1, fenced=False)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (asked, fence)] == [0o644, 0o644]
