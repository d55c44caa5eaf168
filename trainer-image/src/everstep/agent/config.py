"""The configuration of an agent: the job (job.json), its pod (environment) and where things lie (`AgentPaths`)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

PROTOCOL = 1
DISTRIBUTIONS = ("torch", "mpi", "horovod", "none")
FENCINGS = ("checkpoint", "strict")
EXIT_CODE_ACTIONS = RETRY, FAIL, IGNORE = "Retry", "Fail", "Ignore"
MIN_FENCE_TIMEOUT = 1.0  # seconds; heartbeats are a quarter of it, and no lease of 0 s is ever valid


class AgentConfigError(ValueError):
    """job.json or the pod's environment cannot be used; the message names the field."""


@dataclass(frozen=True)
class AgentConfig:
    """One agent's view of its job. Times are seconds."""

    namespace: str
    name: str
    job_uid: str
    attempt_base: int  # in a checkpoint store, where attempts of a later job of the name are greater ones
    num_nodes: int
    num_proc_per_node: int
    command: tuple[str, ...]
    distribution: str
    distribution_options: tuple[str, ...]  # extra mpirun arguments
    variables: dict[str, str]  # for the library in the ranks
    hyperparameters: dict[str, str]
    application_restarts: int
    max_backoff: float  # 0: no back-off
    exit_code_actions: dict[int, str]  # what follows an exit with this code; none: a restart that is charged
    fencing: str
    fence_timeout: float
    hang_timeout: float  # 0: no hang is looked for
    stop_grace: float
    restart_grace: float
    instance_type: str
    service: str  # empty: no DNS names
    port: int
    owns_shared_memory: bool  # nobody but this pod sees its /dev/shm
    owns_ipc: bool  # nor its System V IPC and message queues
    owns_input: bool  # nor the contract's files in /opt/ml/input
    index: int
    epoch: int  # of this pod's creation; a leader leads at this epoch
    pod_uid: str
    pod_ip: str
    leader: str = ""  # ip:port of the leader that ran when this pod was made; empty: there was none

    @property
    def leads(self) -> bool:
        return self.index == 0

    @property
    def leader_address(self) -> str:
        """Return the leader's address, as far as it can be known at the start; empty where there is no DNS either."""
        return self.leader or (f"algo-1.{self.service}:{self.port}" if self.service else "")

    @property
    def mpi(self) -> bool:
        return self.distribution in ("mpi", "horovod")

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.num_proc_per_node

    @property
    def heartbeat(self) -> float:
        """Return the seconds between heartbeats: a leader of any size handles at most 200 a second.

        Four of them fit into the fence timeout, whatever was configured: a node hears of the lease by them only, and
        with a longer interval it would be fenced for ever, though nothing is wrong. The operator gives a large job a
        fence timeout that leaves room for 200 a second.
        """
        interval = max(1.0, self.num_nodes / 200)
        return min(interval, self.fence_timeout / 4)

    @property
    def silence(self) -> float:
        """Return the seconds without a frame after which one end of a link takes the other for lost.

        An agent that stood still (a starved or frozen machine, a network that was away) and goes on must find its link
        as it was: to drop it ends the generation, though all ranks are well. Until the fence timeout nothing is gained
        by it either: a process that ends breaks its link at once, a pod that is replaced says so itself, and only after
        that time a node that cannot be reached has given up the right to publish by itself.
        """
        return max(12.0, 4 * self.heartbeat, self.fence_timeout)


class AgentPaths(NamedTuple):
    """The paths that an agent reads and writes. `owns_pod`: it is PID 1 and may kill every other process that it can
    see."""

    agent: Path
    job: Path
    token: Path
    scratch: Path
    shm: Path | None
    ml: Path
    termination_log: Path
    owns_pod: bool
    slots: Path | None = None
    pod_uid: Path | None = None  # unless the environment has it

    @property
    def checkpoint_request(self) -> Path:
        """Return the file by which ranks learn that a checkpoint is asked for."""
        return self.scratch / "checkpoint-request.json"

    @classmethod
    def for_pod(cls, agent: Path) -> AgentPaths:
        return cls(
            agent=agent,
            job=agent.parent / "job.json",  # in the same volume
            token=agent.parent / "token",
            scratch=Path("/run/everstep"),
            shm=Path("/dev/shm"),  # noqa: S108 - the pod's own memory volume
            ml=Path("/opt/ml"),
            termination_log=Path("/dev/termination-log"),
            owns_pod=os.getpid() == 1,
            slots=Path("/opt/everstep/memory"),  # the pod's own too, and no generation's
            pod_uid=agent.parent / "pod-uid",
        )

    @classmethod
    def for_laptop(cls, agent: Path, base: Path, index: int) -> AgentPaths:
        """Return the paths of laptop mode: `base/job.json` and `base/token` are shared; all that is written lies below
        `base/node-<i>`."""
        node = base / f"node-{index}"
        return cls(
            agent=agent,
            job=base / "job.json",
            token=base / "token",
            scratch=node / "run",
            shm=None,
            ml=node / "ml",
            termination_log=node / "termination-log",
            owns_pod=False,
        )


def load_config(paths: AgentPaths, environ: Mapping[str, str]) -> AgentConfig:
    """Read the configuration of a pod's agent: job.json, its UID and the EVERSTEP_* variables.

    Args:
        paths: Where the files are.
        environ: The variables.

    Raises:
        AgentConfigError: job.json or a variable cannot be used.
        OSError: A file cannot be read.
    """
    try:
        data = json.loads(paths.job.read_bytes())
    except ValueError as error:
        raise AgentConfigError(f"{paths.job}: not JSON: {error}") from error
    if paths.pod_uid is not None and "EVERSTEP_POD_UID" not in environ:
        environ = {**environ, "EVERSTEP_POD_UID": paths.pod_uid.read_text()}
    return parse_config(data, environ)


def parse_config(data: Any, environ: Mapping[str, str]) -> AgentConfig:
    job = _Fields(data, "job.json")
    if job.integer("protocol") != PROTOCOL:
        raise AgentConfigError(
            f"job.json: protocol {data['protocol']} is not {PROTOCOL}: agent and operator do not fit"
        )
    about, distribution, restart = job.child("job"), job.child("distribution"), job.child("restart")
    nodes = job.integer("numNodes", 1)
    index = _environ_integer(environ, "EVERSTEP_INDEX", 0)
    if index >= nodes:
        raise AgentConfigError(f"EVERSTEP_INDEX: {index} is not below numNodes = {nodes}")
    return AgentConfig(
        namespace=about.text("namespace"),
        name=about.text("name"),
        job_uid=about.text("uid"),
        attempt_base=about.integer("created", default=0),
        num_nodes=nodes,
        num_proc_per_node=job.integer("numProcPerNode", 1),
        command=job.texts("command"),
        distribution=distribution.choice("kind", DISTRIBUTIONS),
        distribution_options=distribution.texts("options", ()),
        variables=job.mapping("variables"),
        hyperparameters=job.mapping("hyperparameters"),
        application_restarts=restart.integer("application", 0),
        max_backoff=restart.seconds("maxBackoffSeconds"),
        exit_code_actions=_read_exit_code_actions(restart),
        fencing=job.choice("fencing", FENCINGS),
        fence_timeout=job.seconds("fenceTimeoutSeconds", MIN_FENCE_TIMEOUT),
        hang_timeout=job.seconds("hangTimeoutSeconds", default=0.0),
        stop_grace=job.seconds("stopGraceSeconds"),
        restart_grace=job.seconds("restartGraceSeconds"),
        instance_type=job.text("instanceType", ""),
        service=job.text("service", ""),
        port=job.integer("port"),
        owns_shared_memory=job.boolean("ownsSharedMemory", default=True),
        owns_ipc=job.boolean("ownsIpc", default=True),
        owns_input=job.boolean("ownsInput", default=True),
        index=index,
        epoch=_environ_integer(environ, "EVERSTEP_EPOCH", 1),
        pod_uid=environ.get("EVERSTEP_POD_UID", ""),
        pod_ip=environ.get("EVERSTEP_POD_IP", ""),
        leader=environ.get("EVERSTEP_LEADER", ""),
    )


def _read_exit_code_actions(restart: _Fields) -> dict[int, str]:
    """Return the action of each exit code: the first rule that lists one decides."""
    actions: dict[int, str] = {}
    for rule in restart.children("onExitCodes"):
        for code in rule.integers("codes"):
            actions.setdefault(code, rule.choice("action", EXIT_CODE_ACTIONS))
    return actions


class _Fields:
    """Typed access to one JSON object; unknown fields are left alone, so that a newer operator may add some."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, dict):
            raise AgentConfigError(f"{where}: must be an object")
        self._data: dict[str, Any] = data
        self._where = where

    def _get(self, name: str, kinds: tuple[type, ...], default: Any) -> Any:
        value = self._data.get(name, default)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise AgentConfigError(f"{self._where}: {name} must be {' or '.join(k.__name__ for k in kinds)}")
        return value

    def child(self, name: str) -> _Fields:
        return _Fields(self._data.get(name), f"{self._where}: {name}")

    def children(self, name: str) -> list[_Fields]:
        return [_Fields(each, f"{self._where}: {name}") for each in self._get(name, (list,), [])]

    def integers(self, name: str) -> list[int]:
        values = self._get(name, (list,), None)
        if not all(type(each) is int for each in values):
            raise AgentConfigError(f"{self._where}: {name} must be whole numbers")
        return list(values)

    def text(self, name: str, default: str | None = None) -> str:
        return str(self._get(name, (str,), default))

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        value = self.text(name)
        if value not in choices:
            raise AgentConfigError(f"{self._where}: {name} must be one of {', '.join(choices)}")
        return value

    def integer(self, name: str, minimum: int = 0, default: int | None = None) -> int:
        value = int(self._get(name, (int,), default))
        if value < minimum:
            raise AgentConfigError(f"{self._where}: {name} must be at least {minimum}")
        return value

    def boolean(self, name: str, *, default: bool) -> bool:
        return bool(self._get(name, (bool,), default))

    def seconds(self, name: str, minimum: float = 0.0, default: float | None = None) -> float:
        value = float(self._get(name, (int, float), default))
        if not minimum <= value < float("inf"):
            least = f" of at least {minimum:g}" if minimum else ""
            raise AgentConfigError(f"{self._where}: {name} must be a number of seconds{least}, not {value:g}")
        return value

    def texts(self, name: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        values = self._get(name, (list, tuple), default)
        if not all(isinstance(v, str) for v in values):
            raise AgentConfigError(f"{self._where}: {name} must be a list of strings")
        return tuple(values)

    def mapping(self, name: str) -> dict[str, str]:
        values = self._get(name, (dict,), {})
        if not all(isinstance(v, str) for v in values.values()):
            raise AgentConfigError(f"{self._where}: {name} must map strings to strings")
        return dict(values)


def _environ_integer(environ: Mapping[str, str], name: str, minimum: int) -> int:
    text = environ.get(name, "")
    if not text.isdecimal() or int(text) < minimum:
        raise AgentConfigError(f"{name}: must be a number of at least {minimum}, not {text!r}")
    return int(text)
