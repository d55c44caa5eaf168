"""The nodes of a job as their leader knows them: where they are, who has joined, and what stands in the way of a start.

Pure, like the rest of the leader: what has to be done is told as commands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Callable

from everstep.agent.config import AgentConfig
from everstep.agent.wire import protocol
from everstep.agent.wire.protocol import GenerationReport, Gpu, Hello

from .commands import Command, Dial

DNS_AFTER_SECONDS = 5.0  # seconds without an address from the operator
QUIET_HEARTBEATS = 4  # missed in a row
GPUS_NAMED = 32  # sick ones, in a state that is sent again and again


@dataclass
class JobMember:
    index: int
    address: str = ""  # from the operator's table, its own announcement, or by DNS
    joined: Hello | None = None
    met: set[str] = field(default_factory=set)  # UIDs of the pods that have ever joined as this node
    seen: float = 0.0
    missing_since: float = 0.0
    leaving: bool = False
    unclean: str = ""
    unclean_uid: str = ""
    busy_with: tuple[int, int] = (0, 0)  # (epoch, generation) whose processes it may still have
    gpus: tuple[Gpu, ...] = ()


class JobMembers:
    def __init__(
        self, config: AgentConfig, now: float, tell: Callable[[Command], None], changed: Callable[[], None]
    ) -> None:
        """Begin with no node joined. `changed` is called for what the operator should hear of."""
        self.missing = set(range(config.num_nodes))
        self._quiet: set[int] = set()  # joined nodes that have missed some heartbeats: the operator may look at them
        self.busy: set[int] = set()  # joined nodes that may still have processes of a generation
        self._nodes = [JobMember(i, missing_since=now) for i in range(config.num_nodes)]
        self._config = config
        self._tell = tell
        self._changed = changed

    def __getitem__(self, index: int) -> JobMember:
        return self._nodes[index]

    def __iter__(self) -> Iterator[JobMember]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def ready(self) -> bool:
        """Return whether all nodes are here, to stay, and nothing is left of an earlier generation."""
        return not (self.missing or self.busy or any(n.leaving or n.unclean for n in self._nodes))

    @property
    def any_quiet(self) -> bool:
        """Return whether a joined node has missed some heartbeats: what its ranks do now, nobody hears."""
        return bool(self._quiet)

    def to_json(self) -> dict[str, Any]:
        """Return the nodes' part of the leader's state."""
        return {
            "nodes": len(self._nodes),
            "joined": len(self._nodes) - len(self.missing),
            "missing": sorted(self.missing),
            "quiet": sorted(self._quiet),
            "unclean": [
                {"index": n.index, "uid": n.unclean_uid, "message": n.unclean} for n in self._nodes if n.unclean
            ],
            "gpus": self._gpus_json(),
        }

    # ---- where they are

    def update_addresses(self, addresses: dict[int, str]) -> None:
        """Take in the operator's address table. Whoever is joined stays so until the new address answers: the table may
        be old."""
        for index, given in addresses.items():
            node, address = self._nodes[index], protocol.canonical_address(given)
            if index == 0 or node.address == address:
                continue
            node.address = address
            if node.joined and node.joined.address == address:
                self._tell(Dial(index, ""))
            else:
                self.dial(index)

    def announced(self, index: int, pod_uid: str, address: str) -> None:
        """Take in the address of a new pod, which comes before the operator can know it. It holds until the next table.

        Agents announce themselves until they have had a link: what comes from a pod that was met is late.
        """
        node = self._nodes[index]
        if index > 0 and pod_uid not in node.met:
            node.address = protocol.canonical_address(address)
            self.dial(index)

    def ask_dns(self, now: float) -> None:
        """Fall back to DNS for the nodes of which nobody has said where they are."""
        if not self._config.service:
            return
        for index in sorted(self.missing):
            node = self._nodes[index]
            if index > 0 and not node.address and now - node.missing_since >= DNS_AFTER_SECONDS:
                node.address = f"algo-{index + 1}.{self._config.service}:{self._config.port}"
                self.dial(index)

    def dial(self, index: int) -> None:
        if self._nodes[index].address:
            self._tell(Dial(index, self._nodes[index].address))

    # ---- who is here

    def join(self, now: float, hello: Hello) -> None:
        """Add a node that was not joined and has said hello."""
        node = self._nodes[hello.index]
        node.joined, node.seen, node.leaving, node.unclean, node.gpus = hello, now, False, "", hello.gpus
        node.met.add(hello.pod_uid)
        self.missing.discard(hello.index)
        self._changed()
        if hello.unclean:
            self.mark_unclean(node, hello.unclean)
        if hello.clean:
            self.busy.discard(hello.index)
        else:
            self.busy.add(hello.index)
            node.busy_with = (hello.epoch, hello.generation)

    def lose(self, now: float, index: int) -> None:
        node = self._nodes[index]
        node.joined, node.leaving, node.missing_since, node.gpus = None, False, now, ()
        node.unclean = ""  # a verdict on a pod that is out of reach would be applied to its successor
        self.missing.add(index)
        self.busy.discard(index)
        self._changed()

    def list_silent(self, now: float, slept: float) -> list[JobMember]:
        """Return joined nodes that were not heard of for too long. For `slept` seconds it was this process that was
        stopped or starved: what arrived meanwhile is still to be read."""
        silent, quiet = [], set()
        for node in self._nodes[1:]:  # node 0 is this process
            if node.joined:
                node.seen += max(0.0, slept)
                if now - node.seen > self._config.silence:
                    silent.append(node)
                elif now - node.seen > QUIET_HEARTBEATS * self._config.heartbeat:
                    quiet.add(node.index)
        if quiet != self._quiet:
            self._quiet = quiet
            self._changed()
        return silent

    # ---- how they are

    def started(self, order: tuple[int, int]) -> None:
        """Note that a generation starts everywhere."""
        self.busy = set(range(len(self._nodes)))
        for node in self._nodes:
            node.busy_with = order

    def report(self, index: int, report: GenerationReport) -> None:
        """Take in a report. An old one does not make a node clean of the newest generation."""
        node = self._nodes[index]
        if (report.epoch, report.generation) >= node.busy_with:
            if report.unclean:
                self.mark_unclean(node, report.unclean)
            elif report.clean:
                self.busy.discard(index)

    def mark_unclean(self, node: JobMember, why: str) -> None:
        if node.unclean != why:
            node.unclean = why
            node.unclean_uid = node.joined.pod_uid if node.joined else ""
            self._changed()

    def gpus(self, index: int, gpus: tuple[Gpu, ...]) -> None:
        node = self._nodes[index]
        if node.joined and node.gpus != gpus:
            node.gpus = gpus
            self._changed()

    def _gpus_json(self) -> dict[str, Any] | None:
        """Return the numbers of healthy devices, however many nodes there are; sick devices one by one, as many as a
        person would read."""
        models = Counter(gpu.name for node in self._nodes for gpu in node.gpus)
        if not models:
            return None
        sick = [(node.index, gpu) for node in self._nodes for gpu in node.gpus if gpu.problem]
        return {
            "models": dict(models.most_common(8)),
            "unhealthy": len(sick),
            "devices": [
                {"index": index, "uuid": gpu.uuid, "name": gpu.name, "problem": gpu.problem}
                for index, gpu in sick[:GPUS_NAMED]
            ],
        }
