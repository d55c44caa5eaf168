"""The operator inside the test's own event loop: cheap enough to be killed at every single request."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep import agent_zip
from everstep.agent.wire.auth import job_token
from everstep_operator.app import Operator
from everstep_operator.cluster import errors
from everstep_operator.cluster.agent_code import AgentCode
from everstep_operator.cluster.client import Client, load_credentials
from everstep_operator.plan.observation import parse_pod
from everstep_operator.settings import OperatorSettings
from tests.integration.world import FakeLeader, World
from tests.long_sweeps import only_in_long_sweeps

KEY = bytes(range(32))
WRITES = ("POST", "PATCH", "PUT", "DELETE")
_STARTING = (errors.ServerError, errors.TooManyRequests, errors.NotAuthorized)  # answers of such an API server

Fault = Callable[[int, str, str], str | None]
# Who dies before a write has died after the one before it, but for what it read in between: a sweep of `test-chaos`.
DEATHS = (*only_in_long_sweeps("die"), "die after")


class InjectedClient(Client):
    """Before each write asks `fault(number, method, path)`: None, or one of "lose" (carried out, the answer lost),
    "drop" (never sent), "refuse" (500), "die" and "die after" (the process is gone before or after the request)."""

    def __init__(self, *args: Any, fault: Fault | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fault = fault or (lambda number, method, path: None)
        self.writes = 0
        self.died = asyncio.Event()

    async def _send(self, verb: str, what: str, method: str, path: str, query: Any, body: Any, *how: Any) -> Any:
        if method not in WRITES:
            return await super()._send(verb, what, method, path, query, body, *how)
        self.writes += 1
        fault = self.fault(self.writes, method, path)
        if fault == "die":
            await self._die()
        if fault == "drop":
            raise errors.Unreachable("injected", sent=False)
        if fault == "refuse":
            raise errors.ServerError(500, "Injected", "injected")
        answer = await super()._send(verb, what, method, path, query, body, *how)
        if fault == "die after":
            await self._die()
        if fault == "lose":
            raise errors.Unreachable("injected", sent=True)
        return answer

    async def _die(self) -> None:
        self.died.set()
        await asyncio.Event().wait()  # nothing is ever done again


@contextlib.asynccontextmanager
async def operator(
    kubeconfig: Path, world: World, fault: Fault | None = None, *, agent: bytes | None = None, **settings: Any
) -> AsyncIterator[tuple[Operator, InjectedClient]]:
    """A running operator for the namespace of `world`; it ends as a killed process would, in the middle of anything.
    `agent` is its agent's code, if not this repository's."""
    client = InjectedClient(await load_credentials(str(kubeconfig)), fault=fault, timeout=10)
    given = {"resync_seconds": 5.0, "agent_port": world.agent_port, "watch_namespaces": (world.namespace,)}
    made = Operator(
        OperatorSettings(kubeconfig=str(kubeconfig), **{**given, **settings}),
        client,
        (KEY,),
        AgentCode(agent or agent_zip.build_zipapp()),
    )
    running = asyncio.create_task(made.run(asyncio.Event()))
    try:
        yield made, client
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await made.leaders.close()
        await client.close()


@dataclass
class Simulation:
    """Kubelets and the leader of one job: pods run once they exist, ranks start once the set is complete, and the
    job succeeds when `finish` is set. Looks at nothing but the API server, like the real ones."""

    world: World
    job: str
    nodes: tuple[str, ...] = ()  # where pod 0, pod 1 … run; default: all on one
    mute: set[str] = field(default_factory=set)  # UIDs of pods whose agents nobody hears
    spare: str = ""  # where a pod runs that excludes its node; default: there all the same
    step: int = 0  # of the ranks
    saves: bool = True  # ranks save when they are asked to
    requested: list[str] = field(default_factory=list)  # ids of the requests for checkpoints, as leaders hear them
    loses: tuple[str, ...] = ()  # see FakeLeader, of each new leader
    finish: asyncio.Event = field(default_factory=asyncio.Event)
    leaders: dict[str, FakeLeader] = field(default_factory=dict)
    pods_seen: set[tuple[str, str]] = field(default_factory=set)
    members: dict[str, set[str]] = field(default_factory=dict)  # pods of the present generation, by the leader's
    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Simulation:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        for leader in self.leaders.values():
            await leader.stop()

    async def _run(self) -> None:
        while True:
            # A pod went away meanwhile, or the API server did, or it has just started.
            with contextlib.suppress(errors.NotFound, errors.Conflict, errors.Unreachable, *_STARTING):
                await self._step()
            await asyncio.sleep(0.02)

    async def _step(self) -> None:
        job = await self.world.job(self.job)
        pods = await self.world.pods(self.job)
        for pod in pods:
            meta = pod["metadata"]
            self.pods_seen.add((meta["name"], meta["uid"]))
            if "deletionTimestamp" in meta:
                await self.world.remove(pod)
            elif pod["status"]["phase"] == "Pending":
                index = int(meta["name"].rpartition("-")[2])
                node = self.nodes[index] if self.nodes else "n1"
                await self.world.run(pod, self.spare if self.spare and node in parse_pod(pod).avoids else node)
        zero = next((pod for pod in pods if pod["metadata"]["name"].endswith("-0")), None)
        for uid in [uid for uid in self.leaders if zero is None or uid != zero["metadata"]["uid"]]:
            await self.leaders.pop(uid).stop()
        if zero is not None and zero["status"]["phase"] == "Running":
            await self._lead(job, zero, {p["metadata"]["uid"] for p in pods if p["status"]["phase"] == "Running"})

    async def _lead(self, job: dict[str, Any], zero: dict[str, Any], running: set[str]) -> None:
        meta = zero["metadata"]
        leader = self.leaders.get(meta["uid"])
        wanted = job["spec"].get("numNodes", 1)
        if leader is None:
            view = parse_pod(zero)  # as the agent reads it from its environment and mounts, whatever the labels say
            token = job_token(KEY, job["metadata"]["uid"], view.template)
            leader = FakeLeader(token, self.world.address(zero), self.world.agent_port, view.epoch)
            leader.state["missing"] = list(range(1, wanted))
            leader.loses = set(self.loses)
            await leader.start()
            self.leaders[meta["uid"]] = leader
        told = [len(body["addresses"]) for *_, body in leader.asked("peers")]
        whole = len(running) == wanted and (wanted == 1 or (told and told[-1] == wanted))
        state = leader.state
        if self.mute & running:
            return
        if state["phase"] == "running" and not self.members[meta["uid"]] <= running:
            entry = {"id": f"{state['epoch']}.{state['generation']}", "cause": "PodLost", "endedAt": time.time()}
            await leader.say(phase="forming", generationHistory=[*state["generationHistory"], entry])
        elif state["phase"] == "forming" and whole:
            self.members[meta["uid"]] = running
            said = {"missing": [], "nodes": wanted, "joined": wanted, "ranksStartedAt": 1.0}
            await leader.say(phase="running", generation=len(state["generationHistory"]) + 1, **said)
        elif state["phase"] == "running" and (fresh := self._find_request(leader)):
            self.requested.append(fresh)
            heard = {"id": fresh, "generation": state["generation"], "savedStep": self.step if self.saves else None}
            await leader.say(checkpointRequest=heard)
        elif state["phase"] == "running" and state["progress"] != {"step": self.step} and self.step:
            await leader.say(progress={"step": self.step})
        elif leader.state["phase"] == "running" and self.finish.is_set():
            await leader.say(phase="ended", outcome={"result": "succeeded", "exitCode": 0, "message": ""})

    @staticmethod
    def _find_request(leader: FakeLeader) -> str:
        """Return the id of a request for a checkpoint that the leader has not told of yet, or nothing."""
        ids = [str(body["id"]) for *_, body in leader.asked("checkpoint")]
        known = (leader.state.get("checkpointRequest") or {}).get("id")
        return ids[-1] if ids and ids[-1] != known else ""


def flaky(seed: int, share: float = 0.3, budget: int = 40) -> Fault:
    """A fault for `share` of the first `budget` writes, always the same for a seed."""
    chance = random.Random(seed)
    return lambda number, method, path: (
        chance.choice(["lose", "drop", "refuse"]) if number <= budget and chance.random() < share else None
    )
